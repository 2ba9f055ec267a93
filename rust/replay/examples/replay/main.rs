//! Serves a trace with several policies and numbers of states, and prints what was reused.
//!
//! ```text
//! cargo run --release -p radixstate-replay --example replay -- TRACE --slots 126,235 --policy lru,hit-density
//! ```
//!
//! `TRACE` is a file of JSON lines in the format of the Mooncake traces, or `-` for the standard
//! input. KV is ample. `recomputed` is the share of the prefill FLOPs that is not saved, for a model
//! of 6.6e9 FLOPs a token and 98,304 for each pair of tokens.

mod trace;

use std::error::Error;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::time::Instant;

use radixstate::policy::{Cost, NAMES, by_name_for};
use radixstate_replay::{BLOCK, Recorded, Replay, Totals};
use trace::read;

struct Arguments {
    trace: String,
    slots: Vec<u32>,
    policies: Vec<String>,
}

const USAGE: &str = "usage: replay TRACE --slots N[,N...] --policy NAME[,NAME...]";

impl Arguments {
    fn parse(words: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mut words = words.skip(1);
        let (mut trace, mut slots, mut policies) = (None, Vec::new(), Vec::new());
        while let Some(word) = words.next() {
            match word.as_str() {
                "--slots" => {
                    let list = words.next().ok_or(USAGE)?;
                    slots = list.split(',').map(str::parse).collect::<Result<_, _>>()?;
                }
                "--policy" => {
                    let list = words.next().ok_or(USAGE)?;
                    policies = list.split(',').map(String::from).collect();
                }
                _ => trace = Some(word),
            }
        }
        let trace = trace.ok_or(USAGE)?;
        if slots.is_empty() || policies.is_empty() {
            return Err(USAGE.into());
        }
        Ok(Self {
            trace,
            slots,
            policies,
        })
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let Arguments {
        trace,
        slots,
        policies,
    } = Arguments::parse(std::env::args())?;
    let lines: Box<dyn BufRead> = match trace.as_str() {
        "-" => Box::new(io::stdin().lock()),
        path => Box::new(BufReader::new(File::open(path)?)),
    };
    let (requests, bad) = read(lines);
    for line in bad {
        eprintln!("{trace}: {line}");
    }
    if requests.is_empty() {
        return Err(format!("{trace}: no request").into());
    }
    println!("policy        slots  reused  recomputed  evicted  us a request");
    for name in &policies {
        for &states in &slots {
            run(name, states, &requests)?;
        }
    }
    Ok(())
}

fn run(name: &str, states: u32, requests: &[Recorded]) -> Result<(), Box<dyn Error>> {
    let cost = Cost::default();
    // Depths of the cache count blocks.
    let policy = by_name_for(name, cost.per(BLOCK as u32));
    let policy = policy.ok_or_else(|| {
        let known = NAMES.join(", ");
        format!("policy must be one of {known}, got {name:?}")
    })?;
    let mut replay = Replay::new(requests, states, cost, policy)?;
    let mut totals = Totals::default();
    let begun = Instant::now();
    for request in requests {
        replay.serve(request, &mut totals)?;
    }
    let each = begun.elapsed() / u32::try_from(requests.len())?;
    let evicted = replay.cache.stats().evictions.for_checkpoint.checkpoints;
    println!(
        "{name:12} {states:6}  {:6.3}  {:10.3}  {evicted:7}  {:12.2}",
        totals.reuse(),
        totals.recomputed(),
        each.as_secs_f64() * 1e6,
    );
    Ok(())
}
