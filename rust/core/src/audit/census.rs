//! Who owns what, counted from nothing.

use std::collections::BTreeMap;

use super::{Rule, Violation};
use crate::cache::Cache;
use crate::checkpoint::Listed;
use crate::ledger::{Holdings, Leased};
use crate::pool::{Pool, Slot, Tag, Usage};
use crate::tree::{Node, NodeIdx};

/// Who was found with a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    FreeList,
    Outbox,
    Node { index: NodeIdx, pinned: bool },
    Withdrawn { serial: u64 },
    Lease(usize),
    Sequence(usize),
    Pending(usize),
    Retiring,
}

/// Slots as found, and pins as they should be.
#[derive(Default)]
pub(super) struct Census {
    kv: Vec<(u32, Owner)>,
    active: Vec<(u32, Owner)>,
    checkpoints: Vec<(u32, Owner)>,
    node_pins: BTreeMap<NodeIdx, u32>,
    checkpoint_pins: BTreeMap<u64, u32>,
    pub(super) violations: Vec<Violation>,
}

impl Census {
    /// Counts a whole cache.
    pub(super) fn of<O>(cache: &Cache<O>) -> Self {
        let mut census = Self::default();
        census.records(cache);
        census.nodes(cache);
        census.pools(cache);
        census.pins(cache);
        census.links(cache);
        census.order(cache);
        census.writing(cache);
        census.leases(cache);
        census
    }

    fn report(&mut self, rule: Rule, detail: String) {
        self.violations.push(Violation { rule, detail });
    }

    pub(super) fn expect(&mut self, rule: Rule, holds: bool, detail: impl FnOnce() -> String) {
        if !holds {
            self.report(rule, detail());
        }
    }

    fn records<O>(&mut self, cache: &Cache<O>) {
        cache
            .leases
            .iter()
            .for_each(|(key, lease)| self.holdings(&lease.holdings, Owner::Lease(key)));
        cache
            .sequences
            .iter()
            .for_each(|(key, run)| self.holdings(&run.lease.holdings, Owner::Sequence(key)));
        cache
            .pending
            .iter()
            .for_each(|(key, writing)| self.holdings(&writing.holdings, Owner::Pending(key)));
        cache
            .ledger
            .flight
            .retiring()
            .for_each(|holdings| self.holdings(holdings, Owner::Retiring));
        for (_, write) in cache.ledger.flight.writing() {
            *self.node_pins.entry(write.node.index).or_default() += 1;
            if let Some(serial) = write.serial {
                *self.checkpoint_pins.entry(serial).or_default() += 1;
            }
        }
    }

    fn holdings(&mut self, holdings: &Holdings, owner: Owner) {
        let Holdings {
            node,
            checkpoint,
            pages,
            active,
            state,
        } = holdings;
        found(&mut self.kv, pages.ids(), owner);
        found(&mut self.active, active.ids(), owner);
        found(&mut self.checkpoints, state.iter().map(Slot::id), owner);
        if let Some(node) = node {
            *self.node_pins.entry(*node).or_default() += 1;
        }
        if let Some(pin) = checkpoint {
            *self.checkpoint_pins.entry(pin.serial).or_default() += 1;
        }
    }

    fn nodes<O>(&mut self, cache: &Cache<O>) {
        let prefixes = &cache.ledger.prefixes;
        let has_kv = prefixes.has_kv();
        for (index, node) in prefixes.tree().nodes() {
            found(
                &mut self.kv,
                node.pages.ids(),
                Owner::Node {
                    index,
                    pinned: node.pins > 0,
                },
            );
            let page = prefixes.grid().page;
            let pages = if has_kv { node.key.len() / page } else { 0 };
            let whole = node.key.len().is_multiple_of(page) && node.pages.len() == pages;
            self.expect(Rule::Pages, whole, || {
                format!(
                    "node {index} has {} tokens and {} pages of {page}",
                    node.key.len(),
                    node.pages.len()
                )
            });
            if let Some(checkpoint) = &node.checkpoint {
                let owner = Owner::Node {
                    index,
                    pinned: checkpoint.pins > 0,
                };
                found(&mut self.checkpoints, [checkpoint.slot.id()], owner);
                let legal = prefixes.grid().legal;
                let on_grid = node.end.is_multiple_of(legal) && node.end > 0;
                self.expect(Rule::Depth, on_grid, || {
                    format!(
                        "node {index} has a checkpoint at depth {}, legal are multiples of {legal}",
                        node.end
                    )
                });
            }
            let kept = node.children > 0 || node.pins > 0 || node.checkpoint.is_some();
            self.expect(Rule::Leaf, kept, || {
                format!("node {index} is an unpinned leaf without a checkpoint")
            });
            let needless = prefixes.tree().needless(index);
            self.expect(Rule::Joined, needless.is_none(), || {
                format!("node {index} neither branches nor holds a state nor is leased")
            });
        }
        for (&serial, checkpoint) in prefixes.withdrawn() {
            found(
                &mut self.checkpoints,
                [checkpoint.slot.id()],
                Owner::Withdrawn { serial },
            );
        }
    }

    fn pools<O>(&mut self, cache: &Cache<O>) {
        let prefixes = &cache.ledger.prefixes;
        let kv = std::mem::take(&mut self.kv);
        let active = std::mem::take(&mut self.active);
        let checkpoints = std::mem::take(&mut self.checkpoints);
        self.pool(prefixes.kv(), kv);
        self.pool(&cache.ledger.active, active);
        self.pool(prefixes.checkpoints(), checkpoints);
    }

    fn pool<P: Tag>(&mut self, pool: &Pool<P>, mut owners: Vec<(u32, Owner)>) {
        found(&mut owners, pool.free_ids(), Owner::FreeList);
        found(&mut owners, pool.outbox_ids(), Owner::Outbox);
        owners.sort_unstable();
        self.recount(pool, &owners);
        let mut rest = owners.as_slice();
        for id in pool.known_ids() {
            let strange = rest.partition_point(|&(other, _)| other < id);
            self.strangers::<P>(&rest[..strange]);
            let (mine, others) = rest[strange..]
                .split_at(rest[strange..].partition_point(|&(other, _)| other == id));
            rest = others;
            self.expect(Rule::OneOwner, !mine.is_empty(), || {
                format!("{} slot {id} is lost", P::KIND)
            });
            self.expect(Rule::OneOwner, mine.len() < 2, || {
                let owners: Vec<Owner> = mine.iter().map(|&(_, owner)| owner).collect();
                format!("{} slot {id} is owned twice: {owners:?}", P::KIND)
            });
        }
        self.strangers::<P>(rest);
    }

    fn strangers<P: Tag>(&mut self, owners: &[(u32, Owner)]) {
        self.expect(Rule::OneOwner, owners.is_empty(), || {
            format!("{} pool: slots it never gave out: {owners:?}", P::KIND)
        });
    }

    fn recount<P: Tag>(&mut self, pool: &Pool<P>, owners: &[(u32, Owner)]) {
        let mut found = Usage {
            capacity: pool.config().capacity as usize,
            free: pool.untouched(),
            ..Usage::default()
        };
        for (_, owner) in owners {
            *match owner {
                Owner::FreeList => &mut found.free,
                Owner::Outbox => &mut found.outbox,
                Owner::Node { pinned: false, .. } => &mut found.evictable,
                Owner::Node { pinned: true, .. } | Owner::Withdrawn { .. } => &mut found.pinned,
                Owner::Lease(_) | Owner::Sequence(_) | Owner::Pending(_) => &mut found.held,
                Owner::Retiring => &mut found.retiring,
            } += 1;
        }
        let counted = pool.usage();
        self.expect(Rule::Counters, counted == found, || {
            format!(
                "{} pool counts {counted:?}, a recount finds {found:?}",
                P::KIND
            )
        });
        let Usage {
            capacity,
            free,
            held,
            evictable,
            pinned,
            retiring,
            outbox,
        } = counted;
        let sum = free + held + evictable + pinned + retiring + outbox;
        self.expect(Rule::Counters, pool.takes_ids() || sum == capacity, || {
            format!(
                "{} pool: {counted:?} does not add up to its capacity",
                P::KIND
            )
        });
    }

    fn pins<O>(&mut self, cache: &Cache<O>) {
        let prefixes = &cache.ledger.prefixes;
        for (_, node) in prefixes.tree().nodes().filter(|(_, node)| node.pins > 0) {
            if let Some(parent) = node.parent {
                *self.node_pins.entry(parent).or_default() += 1;
            }
        }
        let mut pins = std::mem::take(&mut self.node_pins);
        let mut readers = std::mem::take(&mut self.checkpoint_pins);
        for (index, node) in prefixes.tree().nodes() {
            let expected = pins.remove(&index).unwrap_or(0);
            self.expect(Rule::Pins, node.pins == expected, || {
                format!(
                    "node {index} counts {} pins, {expected} are held",
                    node.pins
                )
            });
            if let Some(checkpoint) = &node.checkpoint {
                let expected = readers.remove(&checkpoint.serial).unwrap_or(0);
                self.expect(Rule::Pins, checkpoint.pins == expected, || {
                    format!(
                        "checkpoint of node {index} counts {} pins, {expected} are held",
                        checkpoint.pins
                    )
                });
                self.expect(
                    Rule::PinnedCheckpoint,
                    checkpoint.pins == 0 || node.pins > 0,
                    || format!("checkpoint of node {index} is pinned, its node is not"),
                );
            }
        }
        for (serial, checkpoint) in prefixes.withdrawn() {
            let expected = readers.remove(serial).unwrap_or(0);
            self.expect(
                Rule::Pins,
                checkpoint.pins == expected && expected > 0,
                || {
                    format!(
                        "withdrawn checkpoint {serial} counts {} pins, {expected} are held",
                        checkpoint.pins
                    )
                },
            );
        }
        self.expect(Rule::Pins, pins.is_empty(), || {
            format!("pins on nodes that are gone: {pins:?}")
        });
        self.expect(Rule::PinnedCheckpoint, readers.is_empty(), || {
            format!("pins on checkpoints that are gone, by serial: {readers:?}")
        });
    }

    fn links<O>(&mut self, cache: &Cache<O>) {
        let tree = cache.ledger.prefixes.tree();
        let mut children: BTreeMap<NodeIdx, u32> = BTreeMap::new();
        let mut linked = 0;
        for (index, node) in tree.nodes() {
            let sound = match node.parent {
                None => {
                    let root = tree.namespace(index).and_then(|it| tree.root(it));
                    let found = root == Some(index);
                    node.end == 0 && node.key.is_empty() && found == node.attached
                }
                Some(parent) => {
                    *children.entry(parent).or_default() += 1;
                    linked += usize::from(node.attached);
                    self.child_is_sound(cache, index, node, parent)
                }
            };
            self.expect(Rule::Links, sound, || {
                format!(
                    "node {index} ending at {} is not linked as it says",
                    node.end
                )
            });
        }
        for (index, node) in tree.nodes() {
            let counted = children.get(&index).copied().unwrap_or(0);
            self.expect(Rule::Links, node.children == counted, || {
                format!(
                    "node {index} counts {} children, {counted} name it as parent",
                    node.children
                )
            });
            // One more than there should be shows a circle.
            let siblings = tree.children(index).take(counted as usize + 1);
            let siblings = siblings.filter(|&child| tree.node(child).parent == Some(index));
            let listed = siblings.count();
            self.expect(Rule::Links, listed == counted as usize, || {
                format!("node {index} lists {listed} children, {counted} name it as parent")
            });
        }
        self.expect(Rule::Links, tree.table_len() == linked, || {
            format!(
                "the table of children has {} entries for {linked} attached nodes",
                tree.table_len()
            )
        });
    }

    fn child_is_sound<O>(
        &self,
        cache: &Cache<O>,
        index: NodeIdx,
        node: &Node,
        parent: NodeIdx,
    ) -> bool {
        let tree = cache.ledger.prefixes.tree();
        let above = tree.node_at(parent);
        let joined = above.is_some_and(|above| {
            node.end == above.end + node.key.len() && node.attached <= above.attached
        });
        let reachable = || tree.child_on(parent, &node.key) == Some((index, node.key.len()));
        joined && !node.key.is_empty() && (!node.attached || reachable())
    }

    fn order<O>(&mut self, cache: &Cache<O>) {
        let prefixes = &cache.ledger.prefixes;
        let mut listed = 0;
        for (index, node) in prefixes.tree().nodes() {
            let Some(checkpoint) = &node.checkpoint else {
                continue;
            };
            let wanted = if checkpoint.pins > 0 {
                Listed::No
            } else if node.is_free_leaf() {
                Listed::Leaf
            } else {
                Listed::State
            };
            listed += usize::from(wanted != Listed::No);
            let noted = checkpoint.listed;
            self.expect(Rule::Order, noted == wanted, || {
                format!("checkpoint of node {index}: {wanted:?} demanded, {noted:?} noted")
            });
            let held = prefixes.policy().holds(&prefixes.candidate(index));
            self.expect(Rule::Order, held == (noted != Listed::No), || {
                format!("checkpoint of node {index}: {noted:?} noted, the policy disagrees")
            });
        }
        let count = prefixes.policy().count();
        self.expect(Rule::Order, count == listed, || {
            format!("the policy has {count} candidates, {listed} can be evicted")
        });
    }

    fn writing<O>(&mut self, cache: &Cache<O>) {
        let tree = cache.ledger.prefixes.tree();
        let mut writers: Vec<u64> = Vec::new();
        let mut written: Vec<NodeIdx> = Vec::new();
        for (_, write) in cache.ledger.flight.writing() {
            writers.extend(write.serial);
            let path = tree.path(write.node.index);
            written.extend(path.take_while(|&at| tree.node(at).end > write.brought));
        }
        for (index, node) in tree.nodes() {
            let proven = node.proven || !node.attached || written.contains(&index);
            self.expect(Rule::Writing, proven, || {
                format!("node {index} is not proven, and nothing writes it")
            });
            let Some(checkpoint) = &node.checkpoint else {
                continue;
            };
            let written = writers.contains(&checkpoint.serial);
            self.expect(Rule::Writing, checkpoint.ready != written, || {
                format!(
                    "checkpoint of node {index}: ready {}, being written {written}",
                    checkpoint.ready
                )
            });
        }
    }

    fn leases<O>(&mut self, cache: &Cache<O>) {
        cache
            .leases
            .iter()
            .for_each(|(key, leased)| self.lease(cache, leased, Owner::Lease(key)));
        for (key, run) in &cache.sequences {
            let owner = Owner::Sequence(key);
            self.lease(cache, &run.lease, owner);
            let wanted = cache.ledger.pages_for(run.claimed);
            let shared = cache.ledger.pages_for(run.lease.depth);
            let held = shared + run.lease.holdings.pages.len();
            self.expect(Rule::Lease, held == wanted, || {
                format!(
                    "{owner:?} claims {} tokens with {held} pages, {wanted} are needed",
                    run.claimed
                )
            });
            let tree = cache.ledger.prefixes.tree();
            let agrees = run
                .lease
                .holdings
                .node
                .is_none_or(|node| tree.agrees(node, &run.tokens));
            self.expect(Rule::Lease, agrees, || {
                format!("the tokens of {owner:?} do not continue its leased prefix")
            });
        }
    }

    fn lease<O>(&mut self, cache: &Cache<O>, leased: &Leased, owner: Owner) {
        let node = leased
            .holdings
            .node
            .map(|node| cache.ledger.prefixes.tree().node_at(node));
        let end = node.map_or(Some(0), |node| node.map(|node| node.end));
        self.expect(Rule::Lease, end == Some(leased.depth), || {
            format!(
                "{owner:?} leases depth {}, its node ends at {end:?}",
                leased.depth
            )
        });
    }
}

fn found(list: &mut Vec<(u32, Owner)>, ids: impl IntoIterator<Item = u32>, owner: Owner) {
    list.extend(ids.into_iter().map(|id| (id, owner)));
}
