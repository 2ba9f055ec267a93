//! Every invariant, recomputed from nothing. Reports, never ends the process.

mod census;
pub(crate) mod faults;
#[cfg(test)]
mod seeded;

use std::fmt;

use crate::cache::Cache;
use crate::pool::PageOwner;
use census::Census;

/// The invariant that a [`Violation`] breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// A slot has exactly one owner, and its pool knows which kind.
    OneOwner,
    /// Counters equal a recount, and add up to the capacity.
    Counters,
    /// Pins of a node are its leases plus its children that have pins; those of a checkpoint are
    /// its readers and writer.
    Pins,
    /// A pinned checkpoint is in its pinned node, or withdrawn.
    PinnedCheckpoint,
    /// Parent links, child counts, roots and the table of children describe one tree.
    Links,
    /// A node's run is whole pages, and it owns one page for each, or none in a purely linear
    /// model.
    Pages,
    /// A checkpoint stands at a legal depth.
    Depth,
    /// The eviction order holds exactly what can be evicted.
    Order,
    /// An unpinned leaf has a checkpoint.
    Leaf,
    /// A node branches, holds a state or is leased, unless its run or the next is being written.
    Joined,
    /// A checkpoint that is not ready, and a page that must not be shared yet, has a writer in
    /// flight.
    Writing,
    /// A lease ends at its node, and a sequence's tokens and pages continue its path.
    Lease,
    /// No page is free in the engine and owned by the cache.
    EngineFree,
}

/// One thing found wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The invariant.
    pub rule: Rule,
    /// Pool, slots, nodes, owners and numbers.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.detail)
    }
}

/// Everything that [`Cache::check`] found wrong; at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// All violations.
    pub violations: Vec<Violation>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} invariants broken", self.violations.len())?;
        self.violations
            .iter()
            .try_for_each(|violation| write!(f, "\n  {violation}"))
    }
}

impl std::error::Error for Report {}

impl<O: PageOwner> Cache<O> {
    /// Recomputes every invariant and reports all violations at once. Its cost grows with
    /// everything that is cached: for tests and for an operator's question, not for each step.
    ///
    /// `engine_free` are pages that are free in an engine that names them: none may be owned here.
    ///
    /// # Errors
    /// The [`Report`].
    pub fn check(&mut self, engine_free: Option<&[u32]>) -> Result<(), Report> {
        self.collect_dropped();
        let mut census = Census::of(self);
        for &page in engine_free.unwrap_or_default() {
            let adopted = self.ledger.prefixes.kv().owns(page);
            census.expect(Rule::EngineFree, !adopted, || {
                format!("kv page {page} is free in the engine and adopted here")
            });
        }
        let violations = census.violations;
        if violations.is_empty() {
            Ok(())
        } else {
            Err(Report { violations })
        }
    }
}
