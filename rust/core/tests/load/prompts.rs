//! Users in groups: a group shares a system prompt, a user comes back with the same history.

use radixstate::Namespace;

use radixstate_replay::Random;

pub(crate) const PAGE: usize = 16;
/// Depths at which a checkpoint may stand.
pub(crate) const LEGAL: usize = 64;
/// Tokens that all users of a group share.
const SYSTEM: usize = 2 * LEGAL;
const GROUP: usize = 100;
const TENANTS: usize = 4;
/// Above every token of [`Random::token`].
const FIRST_ID: usize = 2;

pub(crate) struct Prompts {
    pub(crate) users: usize,
    namespaces: Vec<Namespace>,
}

impl Prompts {
    pub(crate) fn new(users: usize) -> Self {
        let tenant = |n: usize| Namespace::new(0, Some(&format!("tenant {n}")), 0);
        Self {
            users,
            namespaces: (0..TENANTS).map(tenant).collect(),
        }
    }

    pub(crate) fn namespace(&self, user: usize) -> &Namespace {
        &self.namespaces[user / GROUP % TENANTS]
    }

    /// What is cached of a user when nothing has been evicted: one leaf of the tree.
    pub(crate) fn history(&self, user: usize) -> Vec<u32> {
        let system = std::iter::repeat_n(FIRST_ID + user / GROUP, SYSTEM);
        system
            .chain(std::iter::repeat_n(FIRST_ID + user, LEGAL))
            .map(|token| token as u32)
            .collect()
    }

    /// Pages of all histories.
    pub(crate) fn cached_pages(&self) -> usize {
        (self.users * LEGAL + self.users.div_ceil(GROUP) * SYSTEM) / PAGE
    }

    /// A user, low numbers more often, and a prompt that goes on from the history.
    pub(crate) fn draw(&self, random: &mut Random) -> (usize, Vec<u32>) {
        let user = random.below(self.users).min(random.below(self.users));
        let mut tokens = self.history(user);
        tokens.extend((0..1 + random.below(2 * LEGAL)).map(|_| random.token()));
        (user, tokens)
    }
}
