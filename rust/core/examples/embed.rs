//! A small scheduler that embeds the cache: chunked prefill, decode, checkpoints, and what to do
//! when a pool is short.
//!
//! Run with `cargo run -p radixstate --example embed`. There is no model here: where an engine
//! would launch a kernel, the comment says which, and which slots it gets.

use std::collections::VecDeque;

use radixstate::{
    Begin, Cache, Commit, Config, Error, Misuse, Namespace, Piece, PoolConfig, PoolKind,
    Reservation, Sequence, Shortage, StartOptions, Started,
};

/// Most tokens of one prefill launch.
const CHUNK: usize = 32;
const ANSWER: usize = 8;

/// A running request: the cache's handle, and how far its state has got.
struct Request {
    sequence: Sequence,
    prompt: usize,
    computed: usize,
    /// What is left of the prompt, cut where a stored state helps later prompts.
    pieces: VecDeque<Piece>,
}

struct Scheduler {
    cache: Cache,
    namespace: Namespace,
    waiting: VecDeque<Vec<u32>>,
    running: Vec<Request>,
    prefilled: usize,
}

fn main() -> Result<(), Error> {
    // 3 running states of 8 MB, 6 cached states of 2 MB (int8), and KV for 48 pages of 16 tokens.
    let config = Config {
        page_size: 16,
        checkpoint_stride: 32,
        kv: PoolConfig::internal(48).bytes(64 << 10),
        active: PoolConfig::internal(3).bytes(8 << 20),
        checkpoints: PoolConfig::internal(6).bytes(2 << 20),
    };
    let mut scheduler = Scheduler {
        cache: Cache::new(config)?,
        namespace: Namespace::default(),
        waiting: prompts().into(),
        running: Vec::new(),
        prefilled: 0,
    };
    while !(scheduler.waiting.is_empty() && scheduler.running.is_empty()) {
        scheduler.step()?;
    }
    scheduler.report();
    Ok(())
}

/// Three system prompts of 96 tokens, each with several questions of 40.
fn prompts() -> Vec<Vec<u32>> {
    let question = |n: u32| {
        let system = n % 3 * 1000;
        (system..system + 96)
            .chain(n * 10_000..n * 10_000 + 40)
            .collect()
    };
    (1..=12).map(question).collect()
}

impl Scheduler {
    /// One step of the engine: whatever is launched in it may touch what the running requests hold.
    fn step(&mut self) -> Result<(), Error> {
        let step = self.cache.begin_step();
        self.admit()?;
        for mut request in std::mem::take(&mut self.running) {
            if self.advance(&mut request)? {
                self.cache.finish(request.sequence)?;
            } else {
                self.running.push(request);
            }
        }
        // An engine that runs ahead of its device retires a step when the device reports it, in any
        // order, and names the checkpoints whose encoder found a value that is not finite.
        self.cache.retire_step(step, &[])?;
        Ok(())
    }

    fn admit(&mut self) -> Result<(), Error> {
        while let Some(prompt) = self.waiting.pop_front() {
            let first = StartOptions {
                reserve: Some(CHUNK),
                ..StartOptions::default()
            };
            let Started {
                sequence,
                matched,
                begin,
            } = match self.cache.start(&self.namespace, &prompt, first) {
                Ok(started) => started,
                Err(Error::Shortage(Shortage::Busy(_))) => {
                    // Nothing has changed: it waits until something ends.
                    self.waiting.push_front(prompt);
                    return Ok(());
                }
                Err(never) => return Err(never),
            };
            match begin {
                // launch: zero the active slot `dst`
                Begin::Clear { .. } => {}
                // launch: decode checkpoint slot `src` into the active slot `dst`
                Begin::Load { .. } => {}
            }
            self.cache.loaded(&sequence)?;
            let pieces = self.cache.pieces(&sequence, Some(CHUNK))?.into();
            self.running.push(Request {
                sequence,
                prompt: prompt.len(),
                computed: matched.length,
                pieces,
            });
        }
        Ok(())
    }

    /// One piece of prefill or one token of decode. `true` when the request is complete or had to
    /// give way.
    fn advance(&mut self, request: &mut Request) -> Result<bool, Error> {
        let piece = request.pieces.pop_front();
        if piece.is_none() && request.computed == request.prompt + ANSWER {
            return Ok(true);
        }
        let end = piece.map_or(request.computed + 1, |piece| piece.end);
        if self.claim(request, end)?.is_none() {
            let prompt = self.cache.view(&request.sequence)?.tokens()[..request.prompt].to_vec();
            self.waiting.push_back(prompt);
            return Ok(true);
        }
        match piece {
            Some(piece) => self.prefilled += piece.end - piece.begin,
            // The token that was sampled.
            None => self.cache.append(&request.sequence, &[7])?,
        }
        // launch: run tokens `computed..end` with the pages and the slot of `view(&sequence)`
        request.computed = end;
        // While decoding, every legal depth may serve the next turn of a chat.
        let keep = piece.map_or(end == self.cache.legal_depth(end), |piece| piece.keep);
        if keep {
            self.checkpoint(&request.sequence, end)?;
        }
        Ok(false)
    }

    /// Pages up to `end`; `None` when so many are in use that this request must give way to the
    /// others.
    fn claim(&mut self, request: &Request, end: usize) -> Result<Option<()>, Error> {
        let claimed = self.cache.view(&request.sequence)?.claimed();
        match self
            .cache
            .grow(&request.sequence, end.saturating_sub(claimed))
        {
            Ok(()) => Ok(Some(())),
            Err(Error::Shortage(Shortage::Busy(_))) => Ok(None),
            Err(other) => Err(other),
        }
    }

    /// Optional work: every outcome is fine.
    fn checkpoint(&mut self, sequence: &Sequence, depth: usize) -> Result<(), Misuse> {
        let source = self.cache.view(sequence)?.slot();
        match self.cache.reserve_checkpoint(sequence, depth, source)? {
            Reservation::Skipped(_) => {} // cached already, or no room
            Reservation::Pending(pending) => {
                // launch: encode active slot `source` into checkpoint slot `pending.slot()`
                match self.cache.commit(sequence, pending)? {
                    // Lookups see it when this step has retired.
                    Commit::Stored(_) => {}
                    // Another request was faster: its pages are shared from now on.
                    Commit::Skipped(_) => {}
                }
            }
        }
        Ok(())
    }

    fn report(&mut self) {
        let stats = self.cache.stats();
        println!(
            "{} starts, {} reused a cached state",
            stats.starts, stats.hits
        );
        println!(
            "{} prompt tokens prefilled, {} taken from the cache",
            self.prefilled, stats.hit_tokens
        );
        println!(
            "{} checkpoints stored, {} evicted",
            stats.stored, stats.evictions.for_checkpoint.checkpoints
        );
        println!("checkpoints hold {} MB", stats.bytes.checkpoints >> 20);
        println!("kv: {:?}", self.cache.usage(PoolKind::Kv));
        self.cache.check(None).expect("every slot has one owner");
    }
}
