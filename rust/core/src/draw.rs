//! A text picture of the tree, for documentation, failure messages and curious people.

use std::fmt::Write;

use crate::cache::Cache;
use crate::namespace::Namespace;
use crate::policy::{CandidateId, Scope};
use crate::pool::PageOwner;
use crate::prefixes::Prefixes;
use crate::tree::NodeIdx;

impl<O: PageOwner> Cache<O> {
    /// Draws every prefix that lookups can reach: a line for each node, with the depths of its run,
    /// and the state at its end. Below 64 levels it only counts them.
    ///
    /// ```
    /// use radixstate::{Cache, Config, Namespace, PoolConfig, Reservation, StartOptions};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let pools = [1, 4].map(PoolConfig::internal);
    /// let mut cache = Cache::new(Config::linear(4, pools[0], pools[1]))?;
    /// for prompt in [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 7, 7, 7, 7, 9]] {
    ///     let started = cache.start(&Namespace::default(), &prompt[..], StartOptions::default())?;
    ///     cache.loaded(&started.sequence)?;
    ///     for depth in [started.matched.branch.unwrap_or(4), 8] {
    ///         if let Reservation::Pending(pending) =
    ///             cache.reserve_checkpoint(&started.sequence, depth, 1)?
    ///         {
    ///             cache.commit(&started.sequence, pending)?;
    ///         }
    ///     }
    ///     cache.finish(started.sequence)?;
    /// }
    /// assert_eq!(cache.draw(), "\
    /// default namespace
    /// └─ 0..4  state in slot 1
    ///    ├─ 4..8  state in slot 2, next to go
    ///    └─ 4..8  state in slot 3
    /// ");
    /// # Ok(())
    /// # }
    /// ```
    pub fn draw(&mut self) -> String {
        self.collect_dropped();
        let next = self.ledger.prefixes.victim(Scope::State);
        let prefixes = &self.ledger.prefixes;
        let mut picture = String::new();
        for (namespace, root) in prefixes.tree().roots() {
            writeln!(picture, "{}", title(namespace)).expect("a String takes all");
            branch(&mut picture, prefixes, root, next, "");
        }
        picture
    }
}

/// A picture's size, and the stack it takes, grow with its levels, of which a prompt may have one for
/// each state.
const LEVELS: usize = 64;

fn title(namespace: &Namespace) -> String {
    if *namespace == Namespace::default() {
        return "default namespace".into();
    }
    let adapter = namespace.adapter();
    let weights = namespace.weights();
    match namespace.tenant() {
        Some(tenant) => format!("adapter {adapter}, weights {weights}, tenant {tenant:?}"),
        None => format!("adapter {adapter}, weights {weights}"),
    }
}

/// Draws what hangs from a node, in the order of its tokens.
fn branch(
    picture: &mut String,
    prefixes: &Prefixes,
    at: NodeIdx,
    next: Option<CandidateId>,
    indent: &str,
) {
    let tree = prefixes.tree();
    let mut children: Vec<NodeIdx> = tree.children(at).collect();
    children.retain(|&child| tree.node(child).attached);
    if !children.is_empty() && indent.chars().count() >= 3 * LEVELS {
        let below = tree.below(at).into_iter();
        let more = below.filter(|&index| tree.node(index).attached).count();
        writeln!(picture, "{indent}└─ {more} more").expect("a String takes all");
        return;
    }
    children.sort_by_key(|&child| &tree.node(child).key);
    for (n, &child) in children.iter().enumerate() {
        let last = n + 1 == children.len();
        let (mark, below) = if last {
            ("└─", "   ")
        } else {
            ("├─", "│  ")
        };
        let line = describe(prefixes, child, next);
        writeln!(picture, "{indent}{mark} {line}").expect("a String takes all");
        branch(picture, prefixes, child, next, &format!("{indent}{below}"));
    }
}

fn describe(prefixes: &Prefixes, at: NodeIdx, next: Option<CandidateId>) -> String {
    let node = prefixes.tree().node(at);
    let mut words = vec![match &node.checkpoint {
        Some(checkpoint) => format!("state in slot {}", checkpoint.slot.id()),
        None => "no state".into(),
    }];
    if node.checkpoint.as_ref().is_some_and(|it| !it.ready) {
        words.push("not ready".into());
    }
    if node.pins > 0 {
        words.push("leased".into());
    }
    if next == Some(CandidateId(at)) {
        words.push("next to go".into());
    }
    format!("{}..{}  {}", node.start(), node.end, words.join(", "))
}
