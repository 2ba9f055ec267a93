//! The radix tree: walk, split, attach, detach. Knows no pools and no recency.
//!
//! Children are found in one flat table keyed by (parent, first page), so a node costs no map of
//! its own and a step down the tree one probe, whatever the fan-out.

use std::collections::BTreeMap;
use std::hash::Hasher;
use std::iter::successors;

use hashbrown::HashTable;
use rustc_hash::FxHasher;

use crate::fault::{Fault, seeded};
use crate::key::{Grid, Namespace};
use crate::node::{Node, NodeId, Parent};
use crate::pool::{Kv, Slots};

#[derive(Debug)]
struct Entry {
    generation: u32,
    node: Option<Node>,
}

#[derive(Debug)]
pub(crate) struct Tree {
    grid: Grid,
    entries: Vec<Entry>,
    vacant: Vec<u32>,
    children: HashTable<u32>,
    roots: BTreeMap<Namespace, u32>,
}

/// Where a key leaves the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reach {
    /// Deepest node whose whole run matched.
    pub(crate) node: u32,
    /// Tokens matched, those inside the next run included.
    pub(crate) matched: usize,
}

impl Tree {
    pub(crate) fn new(grid: Grid) -> Self {
        Self {
            grid,
            entries: Vec::new(),
            vacant: Vec::new(),
            children: HashTable::new(),
            roots: BTreeMap::new(),
        }
    }

    pub(crate) fn node(&self, index: u32) -> &Node {
        self.entries[index as usize]
            .node
            .as_ref()
            .expect("a tree link leads to a node")
    }

    pub(crate) fn node_mut(&mut self, index: u32) -> &mut Node {
        self.entries[index as usize]
            .node
            .as_mut()
            .expect("a tree link leads to a node")
    }

    /// The node, if it still lives.
    pub(crate) fn get(&self, id: NodeId) -> Option<&Node> {
        let entry = self.entries.get(id.index as usize)?;
        entry
            .node
            .as_ref()
            .filter(|_| entry.generation == id.generation)
    }

    /// The node at an index, if there is one: for checks, which trust no link.
    pub(crate) fn node_at(&self, index: u32) -> Option<&Node> {
        self.entries.get(index as usize)?.node.as_ref()
    }

    pub(crate) fn id(&self, index: u32) -> NodeId {
        NodeId {
            index,
            generation: self.entries[index as usize].generation,
        }
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = (u32, &Node)> {
        (0..)
            .zip(&self.entries)
            .filter_map(|(index, entry)| Some((index, entry.node.as_ref()?)))
    }

    pub(crate) fn table_len(&self) -> usize {
        self.children.len()
    }

    pub(crate) fn parent(&self, index: u32) -> Option<u32> {
        match self.node(index).parent {
            Parent::Root(_) => None,
            Parent::Node(parent) => Some(parent),
        }
    }

    pub(crate) fn root(&self, namespace: &Namespace) -> Option<u32> {
        self.roots.get(namespace).copied()
    }

    /// The root of a namespace, made if there is none: an empty namespace keeps nothing.
    pub(crate) fn ensure_root(&mut self, namespace: &Namespace) -> u32 {
        if let Some(root) = self.root(namespace) {
            return root;
        }
        let root = self.put(Node {
            parent: Parent::Root(Box::new(namespace.clone())),
            key: Box::default(),
            end: 0,
            pages: Slots::default(),
            children: 0,
            latest: 0,
            hash: 0,
            pins: 0,
            checkpoint: None,
            attached: true,
        });
        self.roots.insert(namespace.clone(), root);
        root
    }

    /// One step down: the child that `rest` enters, and how many tokens of its run match (at least
    /// a page).
    pub(crate) fn step(&self, at: u32, rest: &[u32]) -> Option<(u32, usize)> {
        let child = self.child(at, rest.get(..self.grid.page)?)?;
        Some((child, self.grid.common(&self.node(child).key, rest)))
    }

    /// Walks down from `at`, a node on the key's path, calling `visit` with each node whose whole
    /// run matches.
    pub(crate) fn walk<'a>(
        &'a self,
        at: u32,
        tokens: &[u32],
        mut visit: impl FnMut(u32, &'a Node),
    ) -> Reach {
        let mut reach = Reach {
            node: at,
            matched: self.node(at).end,
        };
        while let Some((child, common)) = self.step(reach.node, &tokens[reach.matched..]) {
            reach.matched += common;
            let node = self.node(child);
            if common < node.key.len() {
                break;
            }
            reach.node = child;
            visit(child, node);
        }
        reach
    }

    /// The node at or above `at` whose run contains `depth`: `start < depth <= end`.
    pub(crate) fn climb(&self, at: u32, depth: usize) -> u32 {
        let mut index = at;
        while self.node(index).start() >= depth {
            index = self
                .parent(index)
                .expect("every depth above zero lies in a run of its path");
        }
        index
    }

    /// Whether `tokens` and the path to `at` agree as far as both go; a broken path agrees with
    /// nothing.
    pub(crate) fn agrees(&self, at: u32, tokens: &[u32]) -> bool {
        let (mut next, mut below) = (Some(at), usize::MAX);
        while let Some(index) = next {
            let Some(node) = self.node_at(index).filter(|node| node.end <= below) else {
                return false;
            };
            let Some(start) = node.end.checked_sub(node.key.len()) else {
                return false;
            };
            let run = tokens.get(start..).unwrap_or_default();
            let both = run.len().min(node.key.len());
            if run[..both] != node.key[..both] {
                return false;
            }
            (next, below) = (self.parent(index), start);
        }
        true
    }

    /// Page ids of the path to `at`, from the prompt's start.
    pub(crate) fn path_pages(&self, at: u32) -> Vec<u32> {
        let path: Vec<u32> = successors(Some(at), |&index| self.parent(index)).collect();
        let mut ids = Vec::with_capacity(self.node(at).end / self.grid.page);
        path.iter()
            .rev()
            .for_each(|&index| self.node(index).pages.write_ids(&mut ids));
        ids
    }

    /// Hangs a new leaf with the run `key` below `parent`.
    pub(crate) fn add_leaf(&mut self, parent: u32, key: &[u32], pages: Slots<Kv>) -> u32 {
        let above = self.node_mut(parent);
        above.children += 1;
        let (end, attached) = (above.end + key.len(), above.attached);
        let leaf = self.put(Node {
            parent: Parent::Node(parent),
            key: key.into(),
            end,
            pages,
            children: 0,
            latest: 0,
            hash: 0,
            pins: 0,
            checkpoint: None,
            attached,
        });
        self.link(leaf);
        leaf
    }

    /// Cuts a run at `depth`. The lower part keeps id, checkpoint and pins; the upper is pinned if
    /// the lower is.
    pub(crate) fn split(&mut self, lower: u32, depth: usize) -> u32 {
        self.unlink(lower);
        let page = self.grid.page;
        let node = self.node_mut(lower);
        let cut = depth - node.start();
        let (upper_key, lower_key) = (Box::from(&node.key[..cut]), Box::from(&node.key[cut..]));
        let lower_pages = node.pages.split_off(cut / page);
        node.key = lower_key;
        let mut pins = u32::from(node.pins > 0);
        if seeded(Fault::PinsOnUpperHalf) {
            pins = std::mem::take(&mut node.pins);
        }
        let upper = Node {
            parent: node.parent.clone(),
            key: upper_key,
            end: depth,
            pages: std::mem::replace(&mut node.pages, lower_pages),
            children: 1,
            latest: lower,
            hash: 0,
            pins,
            checkpoint: None,
            attached: node.attached,
        };
        let upper = self.put(upper);
        self.node_mut(lower).parent = Parent::Node(upper);
        self.link(upper);
        self.link(lower);
        upper
    }

    /// Takes a childless node out and returns it.
    pub(crate) fn remove(&mut self, index: u32) -> Node {
        assert_eq!(self.node(index).children, 0, "only a leaf is removed");
        if !seeded(Fault::StaleChild) {
            self.unlink(index);
        }
        let entry = &mut self.entries[index as usize];
        let node = entry.node.take().expect("a tree link leads to a node");
        entry.generation = entry.generation.wrapping_add(1);
        self.vacant.push(index);
        match &node.parent {
            Parent::Node(parent) => self.node_mut(*parent).children -= 1,
            Parent::Root(namespace) if node.attached => {
                self.roots.remove(&**namespace);
            }
            Parent::Root(_) => {}
        }
        node
    }

    /// Lookups see an empty tree; the nodes stay until their pins go.
    pub(crate) fn detach_all(&mut self) {
        self.children.clear();
        self.roots.clear();
        for entry in &mut self.entries {
            if let Some(node) = &mut entry.node {
                node.attached = false;
            }
        }
    }

    /// Hides `top` and everything below it from lookups, and lists it; the nodes stay until their
    /// pins go.
    pub(crate) fn detach(&mut self, top: u32) -> Vec<u32> {
        let end = self.node(top).end;
        let below =
            |&(index, node): &(u32, &Node)| node.end >= end && self.climb(index, end) == top;
        // Mostly a leaf just stored, for which no other node needs to be asked.
        let hidden = match self.node(top).children {
            0 => vec![top],
            _ => self.nodes().filter(below).map(|(index, _)| index).collect(),
        };
        for &index in &hidden {
            self.unlink(index);
            self.node_mut(index).attached = false;
        }
        hidden
    }

    fn child(&self, parent: u32, first_page: &[u32]) -> Option<u32> {
        let hangs_here =
            |node: &Node| node.attached && matches!(node.parent, Parent::Node(p) if p == parent);
        // Tolerates a stale entry, which `check()` is there to report.
        let is_it = |&index: &u32| {
            self.node_at(index)
                .is_some_and(|node| hangs_here(node) && node.key.starts_with(first_page))
        };
        let &Node {
            children, latest, ..
        } = self.node(parent);
        // Chats are chains: an only child costs no probe of the table.
        if children == 1 && is_it(&latest) {
            return Some(latest);
        }
        self.children.find(hash(parent, first_page), is_it).copied()
    }

    /// Enters an attached node into the table of children. Roots are found by namespace instead.
    fn link(&mut self, index: u32) {
        let page = self.grid.page;
        let Some(parent) = self.parent(index) else {
            return;
        };
        self.node_mut(parent).latest = index;
        let node = self.node_mut(index);
        node.hash = hash(parent, &node.key[..page]);
        if node.attached {
            let (hash, entries) = (node.hash, &self.entries);
            let rehash = |&other: &u32| {
                entries[other as usize]
                    .node
                    .as_ref()
                    .map_or(0, |node| node.hash)
            };
            self.children.insert_unique(hash, index, rehash);
        }
    }

    fn unlink(&mut self, index: u32) {
        let node = self.node(index);
        if node.attached && matches!(node.parent, Parent::Node(_)) {
            let found = self.children.find_entry(node.hash, |&other| other == index);
            found.expect("an attached child is in the table").remove();
        }
    }

    fn put(&mut self, node: Node) -> u32 {
        if let Some(index) = self.vacant.pop() {
            self.entries[index as usize].node = Some(node);
            return index;
        }
        let index = u32::try_from(self.entries.len()).expect("a tree has fewer than 2^32 nodes");
        self.entries.push(Entry {
            generation: 0,
            node: Some(node),
        });
        index
    }
}

/// A fixed hash: decisions must not differ between processes.
fn hash(parent: u32, first_page: &[u32]) -> u64 {
    let mut hasher = FxHasher::default();
    hasher.write_u32(parent);
    for &token in first_page {
        hasher.write_u32(token);
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(page: u32) -> (Tree, u32) {
        let mut tree = Tree::new(Grid::new(page, 1).unwrap());
        let root = tree.ensure_root(&Namespace::default());
        (tree, root)
    }

    #[test]
    fn children_differ_in_their_first_page() {
        let (mut tree, root) = tree(2);
        let a = tree.add_leaf(root, &[1, 2, 3, 4], Slots::default());
        let b = tree.add_leaf(root, &[1, 3], Slots::default());
        assert_eq!(tree.step(root, &[1, 2, 3, 9]), Some((a, 2)));
        assert_eq!(tree.step(root, &[1, 3, 3]), Some((b, 2)));
        assert_eq!(
            tree.step(root, &[1]),
            None,
            "less than a page enters nothing"
        );
    }

    #[test]
    fn a_split_keeps_the_pins_on_the_lower_half() {
        let (mut tree, root) = tree(1);
        let lower = tree.add_leaf(root, &[1, 2, 3], Slots::default());
        tree.node_mut(lower).pins = 3;
        let upper = tree.split(lower, 2);
        assert_eq!((tree.node(upper).pins, tree.node(lower).pins), (1, 3));
        assert_eq!(
            (
                tree.node(upper).end,
                tree.node(lower).start(),
                tree.node(lower).end
            ),
            (2, 2, 3)
        );
        let mut seen = Vec::new();
        assert_eq!(
            tree.walk(root, &[1, 2, 3], |index, _| seen.push(index))
                .matched,
            3
        );
        assert_eq!(seen, [upper, lower]);
        assert_eq!(
            (
                tree.climb(lower, 2),
                tree.climb(lower, 3),
                tree.climb(lower, 1)
            ),
            (upper, lower, upper)
        );
    }

    #[test]
    fn a_stale_id_names_nothing() {
        let (mut tree, root) = tree(1);
        let leaf = tree.add_leaf(root, &[1], Slots::default());
        let id = tree.id(leaf);
        tree.remove(leaf);
        let again = tree.add_leaf(root, &[2], Slots::default());
        assert_eq!(again, id.index, "the place is reused");
        assert!(tree.get(id).is_none(), "the name is not");
    }
}
