//! A device that knows what every row holds. Work runs long after it was enqueued; rows are
//! poisoned the moment they are free, so reading one too late, or freeing one too early, shows.

/// Stands for the KV or the state after a prefix.
pub(crate) type Digest = u64;

pub(crate) fn digest(tokens: &[u32]) -> Digest {
    tokens.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &token| {
        (hash ^ u64::from(token + 1)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// One kernel launch, with all it reads and writes.
#[derive(Debug)]
pub(crate) enum Work {
    Clear {
        slot: u32,
    },
    Load {
        src: u32,
        dst: u32,
        prefix: Vec<u32>,
    },
    Encode {
        src: u32,
        dst: u32,
        prefix: Vec<u32>,
    },
    Run(Run),
}

/// Runs `tokens[from..]` through the model, reading the KV before it.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) slot: u32,
    pub(crate) pages: Vec<u32>,
    pub(crate) tokens: Vec<u32>,
    pub(crate) from: usize,
    /// Where the state at an intermediate depth goes.
    pub(crate) track: Option<(u32, usize)>,
}

/// Row contents; `None` is poison.
pub(crate) struct Device {
    page: usize,
    pub(crate) kv: Vec<Option<Digest>>,
    pub(crate) active: Vec<Option<Digest>>,
    pub(crate) checkpoints: Vec<Option<Digest>>,
}

impl Device {
    pub(crate) fn new(page: usize, kv: u32, active: u32, checkpoints: u32) -> Self {
        let rows = |n: u32| vec![None; n as usize + 1];
        Self {
            page,
            kv: rows(kv),
            active: rows(active),
            checkpoints: rows(checkpoints),
        }
    }

    pub(crate) fn execute(&mut self, work: &Work) {
        match work {
            &Work::Clear { slot } => self.active[slot as usize] = Some(digest(&[])),
            Work::Load { src, dst, prefix } => {
                let state = self.checkpoints[*src as usize];
                assert_eq!(
                    state,
                    Some(digest(prefix)),
                    "checkpoint {src} holds the state after {prefix:?}"
                );
                self.active[*dst as usize] = state;
            }
            Work::Encode { src, dst, prefix } => {
                let state = self.active[*src as usize];
                assert_eq!(
                    state,
                    Some(digest(prefix)),
                    "slot {src} holds the state after {prefix:?}"
                );
                self.checkpoints[*dst as usize] = state;
            }
            Work::Run(run) => self.run(run),
        }
    }

    fn run(
        &mut self,
        Run {
            slot,
            pages,
            tokens,
            from,
            track,
        }: &Run,
    ) {
        let state = self.active[*slot as usize];
        assert_eq!(
            state,
            Some(digest(&tokens[..*from])),
            "slot {slot} is at depth {from}"
        );
        for (n, &page) in pages.iter().enumerate().take(from.div_ceil(self.page)) {
            let filled = ((n + 1) * self.page).min(*from);
            let held = self.kv[page as usize];
            assert_eq!(
                held,
                Some(digest(&tokens[..filled])),
                "page {page} holds the KV of {:?}",
                &tokens[..filled]
            );
        }
        for (n, &page) in pages
            .iter()
            .enumerate()
            .take(tokens.len().div_ceil(self.page))
            .skip(from / self.page)
        {
            let filled = ((n + 1) * self.page).min(tokens.len());
            self.kv[page as usize] = Some(digest(&tokens[..filled]));
        }
        self.active[*slot as usize] = Some(digest(tokens));
        if let Some((track, depth)) = *track {
            self.active[track as usize] = Some(digest(&tokens[..depth]));
        }
    }
}
