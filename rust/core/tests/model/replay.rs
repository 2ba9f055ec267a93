//! The body of the fuzz target `operations`, and a replay of what it has found worth keeping.

use radixstate::Stats;

use crate::differential;
use radixstate_replay::decode::decode;

/// Runs the operations that bytes mean; any bytes do.
pub(crate) fn replay(bytes: &[u8]) -> Option<Stats> {
    let (drawn, ops, by_page) = decode(bytes).ok()?;
    Some(differential::run(drawn, &ops, by_page))
}
