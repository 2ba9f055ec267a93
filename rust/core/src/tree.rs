//! The radix tree: walk, split, join, attach, detach. Knows no pools and no recency.
//!
//! Children are found in one flat table keyed by (parent, first page), so a step down the tree is
//! one probe whatever the fan-out. They are also linked as siblings, so that a subtree can be
//! listed.

mod grid;
mod node;
mod secret;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::iter::successors;

use hashbrown::HashTable;

pub(crate) use self::grid::Grid;
pub(crate) use self::node::{Node, NodeId, NodeIdx};
use crate::audit::faults::{Fault, seeded};
use crate::namespace::Namespace;
use crate::pool::{KvPage, Slots};
use secret::Secret;

#[derive(Debug)]
struct Entry {
    version: u32,
    node: Option<Node>,
}

#[derive(Debug)]
pub(crate) struct Tree {
    grid: Grid,
    entries: Vec<Entry>,
    vacant: Vec<NodeIdx>,
    children: HashTable<NodeIdx>,
    /// What the keys in `children` are hashed with.
    secret: Secret,
    roots: BTreeMap<Namespace, NodeIdx>,
    /// The other direction of `roots`, so that a node need not have room for a namespace.
    namespaces: BTreeMap<NodeIdx, Namespace>,
}

/// Where a key leaves the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reach {
    /// Deepest node whose whole run matched.
    pub(crate) node: NodeIdx,
    /// Tokens matched, those inside the next run included.
    pub(crate) matched: usize,
    /// The node whose run matched only in part.
    pub(crate) inside: Option<NodeIdx>,
}

impl Tree {
    pub(crate) fn new(grid: Grid) -> Self {
        Self {
            grid,
            entries: Vec::new(),
            vacant: Vec::new(),
            children: HashTable::new(),
            secret: Secret::default(),
            roots: BTreeMap::new(),
            namespaces: BTreeMap::new(),
        }
    }

    pub(crate) fn grid(&self) -> Grid {
        self.grid
    }

    pub(crate) fn node(&self, index: NodeIdx) -> &Node {
        let node = &self.entries[index.place()].node;
        node.as_ref().expect("a tree link leads to a node")
    }

    pub(crate) fn node_mut(&mut self, index: NodeIdx) -> &mut Node {
        self.entries[index.place()]
            .node
            .as_mut()
            .expect("a tree link leads to a node")
    }

    /// The node, if it still lives.
    pub(crate) fn get(&self, id: NodeId) -> Option<&Node> {
        let entry = self.entries.get(id.index.place())?;
        entry.node.as_ref().filter(|_| entry.version == id.version)
    }

    /// The node at an index, if there is one: for checks, which trust no link.
    pub(crate) fn node_at(&self, index: NodeIdx) -> Option<&Node> {
        self.entries.get(index.place())?.node.as_ref()
    }

    pub(crate) fn id(&self, index: NodeIdx) -> NodeId {
        let version = self.entries[index.place()].version;
        NodeId { index, version }
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = (NodeIdx, &Node)> {
        let entries = self.entries.iter().enumerate();
        entries.filter_map(|(n, entry)| Some((NodeIdx::new(n), entry.node.as_ref()?)))
    }

    pub(crate) fn table_len(&self) -> usize {
        self.children.len()
    }

    /// The children of a node, those included that lookups do not see. Newest link first.
    pub(crate) fn children(&self, index: NodeIdx) -> impl Iterator<Item = NodeIdx> {
        successors(self.node(index).first_child, |&child| {
            self.node(child).next_sibling
        })
    }

    /// Every node below `top`, parents before their children.
    pub(crate) fn below(&self, top: NodeIdx) -> Vec<NodeIdx> {
        let mut found: Vec<NodeIdx> = self.children(top).collect();
        let mut next = 0;
        while let Some(&index) = found.get(next) {
            found.extend(self.children(index));
            next += 1;
        }
        found
    }

    pub(crate) fn root(&self, namespace: &Namespace) -> Option<NodeIdx> {
        self.roots.get(namespace).copied()
    }

    /// Roots that lookups see, in the order of their namespaces.
    pub(crate) fn roots(&self) -> impl Iterator<Item = (&Namespace, NodeIdx)> {
        self.roots
            .iter()
            .map(|(namespace, &root)| (namespace, root))
    }

    /// The namespace of a root that lookups see.
    pub(crate) fn namespace(&self, root: NodeIdx) -> Option<&Namespace> {
        self.namespaces.get(&root)
    }

    /// The root of a namespace, made if there is none: an empty namespace keeps nothing.
    pub(crate) fn ensure_root(&mut self, namespace: &Namespace) -> NodeIdx {
        if let Some(root) = self.root(namespace) {
            return root;
        }
        let root = self.put(Node::new(None, Box::default(), 0));
        self.roots.insert(namespace.clone(), root);
        self.namespaces.insert(root, namespace.clone());
        root
    }

    /// One step down: the child that `rest` enters, and how many tokens of its run match (at least
    /// a page).
    pub(crate) fn child_on(&self, at: NodeIdx, rest: &[u32]) -> Option<(NodeIdx, usize)> {
        let child = self.child(at, rest.get(..self.grid.page)?)?;
        Some((child, self.grid.common(&self.node(child).key, rest)))
    }

    /// Walks down from `at`, a node on the key's path, calling `visit` with each node whose whole
    /// run matches.
    pub(crate) fn walk<'a>(
        &'a self,
        at: NodeIdx,
        tokens: &[u32],
        mut visit: impl FnMut(NodeIdx, &'a Node),
    ) -> Reach {
        let mut reach = Reach {
            node: at,
            matched: self.node(at).end,
            inside: None,
        };
        while let Some((child, common)) = self.child_on(reach.node, &tokens[reach.matched..]) {
            reach.matched += common;
            let node = self.node(child);
            if common < node.key.len() {
                reach.inside = Some(child);
                break;
            }
            reach.node = child;
            visit(child, node);
        }
        reach
    }

    /// The nodes from `at` up to its root.
    pub(crate) fn path(&self, at: NodeIdx) -> impl Iterator<Item = NodeIdx> {
        successors(Some(at), |&index| self.node(index).parent)
    }

    /// The node at or above `at` whose run contains `depth`: `start < depth <= end`.
    pub(crate) fn climb(&self, at: NodeIdx, depth: usize) -> NodeIdx {
        self.path(at)
            .find(|&index| self.node(index).start() < depth)
            .expect("every depth above zero lies in a run of its path")
    }

    /// Whether `tokens` and the path to `at` agree as far as both go; a broken path agrees with
    /// nothing.
    pub(crate) fn agrees(&self, at: NodeIdx, tokens: &[u32]) -> bool {
        let mut next = Some(at);
        let mut below = usize::MAX;
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
            next = node.parent;
            below = start;
        }
        true
    }

    /// Page ids of the path to `at`, from the prompt's start.
    pub(crate) fn path_pages(&self, at: NodeIdx) -> Vec<u32> {
        self.pages_past(at, 0)
    }

    /// The pages of a node's path past `depth`, a multiple of the page size.
    pub(crate) fn pages_past(&self, at: NodeIdx, depth: usize) -> Vec<u32> {
        let past = |&index: &NodeIdx| self.node(index).end > depth;
        let path: Vec<NodeIdx> = self.path(at).take_while(past).collect();
        let tokens = self.node(at).end.saturating_sub(depth);
        let mut ids = Vec::with_capacity(tokens / self.grid.page);
        for &index in path.iter().rev() {
            self.node(index).pages.write_ids(&mut ids);
        }
        // The highest of these nodes may begin before `depth`.
        if let Some(&top) = path.last() {
            let shared = depth.saturating_sub(self.node(top).start());
            if !ids.is_empty() {
                ids.drain(..shared / self.grid.page);
            }
        }
        ids
    }

    /// Hangs a new leaf with the run `key` below `parent`.
    pub(crate) fn add_leaf(
        &mut self,
        parent: NodeIdx,
        key: &[u32],
        pages: Slots<KvPage>,
        proven: bool,
    ) -> NodeIdx {
        let above = self.node(parent);
        let attached = above.attached;
        let end = above.end + key.len();
        let leaf = self.put(Node {
            pages,
            attached,
            proven,
            ..Node::new(Some(parent), key.into(), end)
        });
        self.link(leaf);
        leaf
    }

    /// Cuts a run at `depth`. The lower part keeps id, checkpoint and pins; the upper is pinned if
    /// the lower is.
    pub(crate) fn split(&mut self, lower: NodeIdx, depth: usize) -> NodeIdx {
        self.unlink(lower);
        let page = self.grid.page;
        let node = self.node_mut(lower);
        let cut = depth - node.start();
        let upper_key = Box::from(&node.key[..cut]);
        node.key = Box::from(&node.key[cut..]);
        let lower_pages = node.pages.split_off(cut / page);
        let pages = std::mem::replace(&mut node.pages, lower_pages);
        let mut pins = u32::from(node.pins > 0);
        if seeded(Fault::PinsOnUpperHalf) {
            pins = std::mem::take(&mut node.pins);
        }
        let upper = Node {
            pages,
            pins,
            attached: node.attached,
            proven: node.proven,
            ..Node::new(node.parent, upper_key, depth)
        };
        let upper = self.put(upper);
        self.node_mut(lower).parent = Some(upper);
        self.link(upper);
        self.link(lower);
        upper
    }

    /// The child that a node should be joined with: its only one, if the node neither branches nor
    /// holds a state nor is leased. A run that is still being written keeps its end, and hidden
    /// nodes are left as they are.
    pub(crate) fn needless(&self, upper: NodeIdx) -> Option<NodeIdx> {
        let node = self.node(upper);
        if node.children != 1 || node.checkpoint.is_some() || node.parent.is_none() {
            return None;
        }
        let child = node.first_child?;
        let lower = self.node_at(child)?;
        let leased = node.pins > u32::from(lower.pins > 0);
        let visible = node.attached && lower.attached;
        let proven = node.proven && lower.proven;
        (!leased && visible && proven).then_some(child)
    }

    /// Undoes a split: the only child of `upper` takes over its run, and keeps id, checkpoint and
    /// pins.
    pub(crate) fn join(&mut self, upper: NodeIdx, lower: NodeIdx) {
        self.unlink(lower);
        self.unlink(upper);
        let Node {
            parent, key, pages, ..
        } = self.take(upper);
        let node = self.node_mut(lower);
        node.parent = parent;
        let mut run = key.into_vec();
        run.extend_from_slice(&node.key);
        node.key = run.into();
        let below = std::mem::replace(&mut node.pages, pages);
        node.pages.append(below);
        self.link(lower);
    }

    /// Takes a childless node out and returns it.
    pub(crate) fn remove(&mut self, index: NodeIdx) -> Node {
        assert_eq!(self.node(index).children, 0, "only a leaf is removed");
        if seeded(Fault::StaleChild) {
            self.unlink_sibling(index);
        } else {
            self.unlink(index);
        }
        if let Some(namespace) = self.namespaces.remove(&index) {
            self.roots.remove(&namespace);
        }
        self.take(index)
    }

    /// Lookups see an empty tree; the nodes stay until their pins go.
    pub(crate) fn detach_all(&mut self) {
        self.children.clear();
        self.roots.clear();
        self.namespaces.clear();
        for entry in &mut self.entries {
            if let Some(node) = &mut entry.node {
                node.attached = false;
            }
        }
    }

    /// Hides `top` and everything below it from lookups, and lists it; the nodes stay until their
    /// pins go.
    pub(crate) fn detach(&mut self, top: NodeIdx) -> Vec<NodeIdx> {
        let mut hidden = vec![top];
        hidden.extend(self.below(top));
        for &index in &hidden {
            self.leave_table(index);
            self.node_mut(index).attached = false;
        }
        hidden
    }

    fn child(&self, parent: NodeIdx, first_page: &[u32]) -> Option<NodeIdx> {
        // Tolerates a stale entry, which `check()` is there to report.
        let is_it = |&index: &NodeIdx| {
            self.node_at(index).is_some_and(|node| {
                node.attached && node.parent == Some(parent) && node.key.starts_with(first_page)
            })
        };
        let above = self.node(parent);
        let first = above.first_child?;
        // Chats are chains: an only child costs no probe of the table.
        if above.children == 1 && is_it(&first) {
            return Some(first);
        }
        let hash = self.secret.hash(parent.number(), first_page);
        self.children.find(hash, is_it).copied()
    }

    /// Enters a node among its parent's children and, if lookups may reach it, into the table.
    fn link(&mut self, index: NodeIdx) {
        let page = self.grid.page;
        let Some(parent) = self.node(index).parent else {
            return;
        };
        let above = self.node_mut(parent);
        above.children += 1;
        let next = above.first_child.replace(index);
        if let Some(next) = next {
            self.node_mut(next).previous_sibling = Some(index);
        }
        let node = self.node_mut(index);
        node.next_sibling = next;
        node.previous_sibling = None;
        if node.attached {
            self.secret.draw_once(page);
            let node = &self.entries[index.place()].node;
            let node = node.as_ref().expect("a tree link leads to a node");
            let hash = self.secret.hash(parent.number(), &node.key[..page]);
            self.node_mut(index).hash = hash;
            let entries = &self.entries;
            let rehash = |&other: &NodeIdx| match &entries[other.place()].node {
                Some(node) => node.hash,
                None => 0,
            };
            self.children.insert_unique(hash, index, rehash);
        }
    }

    fn unlink(&mut self, index: NodeIdx) {
        self.leave_table(index);
        self.unlink_sibling(index);
    }

    /// Takes an attached node out of the table of children. Roots are found by namespace instead.
    fn leave_table(&mut self, index: NodeIdx) {
        let node = self.node(index);
        if node.attached && node.parent.is_some() {
            let found = self.children.find_entry(node.hash, |&other| other == index);
            found.expect("an attached child is in the table").remove();
        }
    }

    fn unlink_sibling(&mut self, index: NodeIdx) {
        let node = self.node_mut(index);
        let Some(parent) = node.parent else { return };
        let next = node.next_sibling.take();
        let previous = node.previous_sibling.take();
        match previous {
            Some(previous) => self.node_mut(previous).next_sibling = next,
            None => self.node_mut(parent).first_child = next,
        }
        if let Some(next) = next {
            self.node_mut(next).previous_sibling = previous;
        }
        self.node_mut(parent).children -= 1;
    }

    fn put(&mut self, node: Node) -> NodeIdx {
        if let Some(index) = self.vacant.pop() {
            self.entries[index.place()].node = Some(node);
            return index;
        }
        let index = NodeIdx::new(self.entries.len());
        self.entries.push(Entry {
            version: 0,
            node: Some(node),
        });
        index
    }

    /// Frees the place of an unlinked node.
    fn take(&mut self, index: NodeIdx) -> Node {
        let entry = &mut self.entries[index.place()];
        let node = entry.node.take().expect("a tree link leads to a node");
        entry.version = entry.version.wrapping_add(1);
        self.vacant.push(index);
        node
    }
}
