//! What was seen: when each prefix was stored or asked for, whether its state is resident or not.

use hashbrown::HashTable;

use super::Fingerprint;

/// What a prefix is, as far as it says how soon it will be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    /// The end of a first prompt.
    First,
    /// The end of a prompt that continued a first one.
    Second,
    /// The end of a prompt that continued one of those.
    Later,
    /// An end that was continued by a next turn.
    Superseded,
    /// Where prompts part, or one is repeated.
    Branch,
    /// What was asked for as a branch before.
    Again,
}

impl Class {
    pub(super) const ALL: [Self; 6] = [
        Self::First,
        Self::Second,
        Self::Later,
        Self::Superseded,
        Self::Branch,
        Self::Again,
    ];

    /// The end of the prompt that continues this one as its next turn; `None` if this one is no
    /// end, or was continued before.
    pub(super) fn next_turn(self) -> Option<Self> {
        match self {
            Self::First => Some(Self::Second),
            Self::Second | Self::Later => Some(Self::Later),
            Self::Superseded | Self::Branch | Self::Again => None,
        }
    }

    /// What it is when a prompt that is no next turn has asked for it.
    pub(super) fn asked(self) -> Self {
        match self {
            Self::Branch | Self::Again => Self::Again,
            Self::First | Self::Second | Self::Later | Self::Superseded => Self::Branch,
        }
    }
}

/// From a use of a prefix to its next one.
#[derive(Debug, Clone, Copy)]
struct Interval {
    prefix: Fingerprint,
    begun: u64,
    /// Requests that passed until it was asked for again.
    reused: Option<u32>,
    class: Class,
}

/// The newest intervals, at most one of each prefix open. Outlives eviction.
#[derive(Debug, Clone)]
pub(super) struct History {
    /// When it is full, the oldest is overwritten.
    ring: Vec<Interval>,
    capacity: usize,
    oldest: usize,
    /// Where the open ones are.
    open: HashTable<u32>,
    /// Counts requests.
    now: u64,
}

impl History {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            ring: Vec::new(),
            capacity: capacity as usize,
            oldest: 0,
            open: HashTable::new(),
            now: 0,
        }
    }

    /// Requests so far.
    pub(super) fn now(&self) -> u64 {
        self.now
    }

    pub(super) fn begin(&mut self) {
        self.now += 1;
    }

    /// The class of a prefix, if it is remembered.
    pub(super) fn class(&self, prefix: Fingerprint) -> Option<Class> {
        self.find(prefix).map(|at| self.ring[at].class)
    }

    /// A prompt asked for the prefix, which is `class` from now on.
    pub(super) fn ask(&mut self, prefix: Fingerprint, class: Class) {
        if let Some(at) = self.find(prefix) {
            self.close(prefix);
            let age = self.now - self.ring[at].begun;
            self.ring[at].reused = Some(u32::try_from(age).unwrap_or(u32::MAX));
        }
        self.open(prefix, class);
    }

    /// A state of the prefix was stored. What is remembered of it stays; else it is `class`.
    pub(super) fn store(&mut self, prefix: Fingerprint, class: Class) -> Class {
        if let Some(known) = self.class(prefix) {
            return known;
        }
        self.open(prefix, class);
        class
    }

    /// Class and age of each interval, and whether it ended by a reuse.
    pub(super) fn intervals(&self) -> impl Iterator<Item = (Class, u64, bool)> {
        self.ring.iter().map(|it| {
            let age = it.reused.map_or(self.now - it.begun, u64::from);
            (it.class, age, it.reused.is_some())
        })
    }

    fn open(&mut self, prefix: Fingerprint, class: Class) {
        let interval = Interval {
            prefix,
            begun: self.now,
            reused: None,
            class,
        };
        let at = if self.ring.len() < self.capacity {
            self.ring.push(interval);
            self.ring.len() - 1
        } else {
            let at = self.oldest;
            self.oldest = (at + 1) % self.capacity;
            if self.ring[at].reused.is_none() {
                self.close(self.ring[at].prefix);
            }
            self.ring[at] = interval;
            at
        };
        let Self { open, ring, .. } = self;
        let at = u32::try_from(at).expect("a capacity has 32 bits");
        open.insert_unique(prefix.0, at, |&other| ring[other as usize].prefix.0);
    }

    fn find(&self, prefix: Fingerprint) -> Option<usize> {
        let is_it = |&at: &u32| self.ring[at as usize].prefix == prefix;
        self.open.find(prefix.0, is_it).map(|&at| at as usize)
    }

    fn close(&mut self, prefix: Fingerprint) {
        let Self { open, ring, .. } = self;
        let found = open.find_entry(prefix.0, |&at| ring[at as usize].prefix == prefix);
        found.expect("an open interval is in the table").remove();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Fingerprint = Fingerprint(1);

    fn intervals(history: &History) -> Vec<(Class, u64, bool)> {
        history.intervals().collect()
    }

    #[test]
    fn asking_ends_an_interval_and_begins_another() {
        let mut history = History::new(8);
        history.store(A, Class::First);
        (0..5).for_each(|_| history.begin());
        history.ask(A, Class::Superseded);
        history.begin();
        let (ended, open) = ((Class::First, 5, true), (Class::Superseded, 1, false));
        assert_eq!(intervals(&history), [ended, open]);
    }

    #[test]
    fn a_state_that_is_stored_again_is_what_its_prefix_was() {
        let mut history = History::new(8);
        history.store(A, Class::First);
        history.ask(A, Class::Branch);
        assert_eq!(history.store(A, Class::First), Class::Branch);
        assert_eq!(history.intervals().count(), 2);
    }

    #[test]
    fn a_full_history_forgets_the_oldest_and_finds_the_rest() {
        let mut history = History::new(100);
        for n in 0..1_000_u64 {
            history.begin();
            history.store(Fingerprint(n), Class::First);
            history.ask(Fingerprint(n / 2 * 2), Class::Branch);
        }
        assert_eq!(history.intervals().count(), 100);
        let open = history.ring.iter().filter(|it| it.reused.is_none());
        assert_eq!(open.count(), history.open.len());
        assert_eq!(history.class(Fingerprint(1)), None);
        assert_eq!(history.class(Fingerprint(998)), Some(Class::Branch));
        assert_eq!(history.class(Fingerprint(999)), Some(Class::First));
    }

    #[test]
    fn a_chat_goes_from_turn_to_turn_and_what_is_shared_is_a_branch() {
        assert_eq!(Class::First.next_turn(), Some(Class::Second));
        assert_eq!(Class::Second.next_turn(), Some(Class::Later));
        assert_eq!(Class::Superseded.next_turn(), None);
        assert_eq!(Class::Superseded.asked(), Class::Branch);
        assert_eq!(Class::Branch.asked(), Class::Again);
    }
}
