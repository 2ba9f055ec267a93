use super::*;

fn tree(page: u32) -> (Tree, NodeIdx) {
    let mut tree = Tree::new(Grid::new(page, 1).unwrap());
    let root = tree.ensure_root(&Namespace::default());
    (tree, root)
}

fn leaf(tree: &mut Tree, parent: NodeIdx, key: &[u32]) -> NodeIdx {
    tree.add_leaf(parent, key, Slots::default(), true)
}

#[test]
fn children_differ_in_their_first_page() {
    let (mut tree, root) = tree(2);
    let a = leaf(&mut tree, root, &[1, 2, 3, 4]);
    let b = leaf(&mut tree, root, &[1, 3]);
    assert_eq!(tree.child_on(root, &[1, 2, 3, 9]), Some((a, 2)));
    assert_eq!(tree.child_on(root, &[1, 3, 3]), Some((b, 2)));
    let short = tree.child_on(root, &[1]);
    assert_eq!(short, None, "less than a page enters nothing");
}

#[test]
fn a_split_keeps_the_pins_on_the_lower_half() {
    let (mut tree, root) = tree(1);
    let lower = leaf(&mut tree, root, &[1, 2, 3]);
    tree.node_mut(lower).pins = 3;
    let upper = tree.split(lower, 2);
    assert_eq!((tree.node(upper).pins, tree.node(lower).pins), (1, 3));
    assert_eq!(tree.node(upper).end, 2);
    assert_eq!((tree.node(lower).start(), tree.node(lower).end), (2, 3));
    let mut seen = Vec::new();
    let reach = tree.walk(root, &[1, 2, 3], |index, _| seen.push(index));
    assert_eq!((reach.matched, seen), (3, vec![upper, lower]));
    let climbed = [2, 3, 1].map(|depth| tree.climb(lower, depth));
    assert_eq!(climbed, [upper, lower, upper]);
}

#[test]
fn a_join_undoes_a_split() {
    let (mut tree, root) = tree(1);
    let lower = leaf(&mut tree, root, &[1, 2, 3]);
    let upper = tree.split(lower, 2);
    let id = tree.id(upper);
    tree.join(upper, lower);
    assert!(tree.get(id).is_none(), "the upper part is gone");
    assert_eq!(tree.node(lower).key[..], [1, 2, 3]);
    assert_eq!(tree.child_on(root, &[1, 2, 3]), Some((lower, 3)));
    assert_eq!(tree.below(root), [lower]);
    assert_eq!(tree.table_len(), 1);
}

#[test]
fn a_subtree_is_listed_whatever_was_unlinked() {
    let (mut tree, root) = tree(1);
    let nodes: Vec<NodeIdx> = (1..=4)
        .map(|token| leaf(&mut tree, root, &[token]))
        .collect();
    let grandchild = leaf(&mut tree, nodes[1], &[9]);
    tree.remove(nodes[2]);
    tree.remove(nodes[3]);
    tree.remove(nodes[0]);
    assert_eq!(tree.below(root), [nodes[1], grandchild]);
    assert_eq!(tree.detach(nodes[1]), [nodes[1], grandchild]);
    assert_eq!(tree.table_len(), 0);
    assert_eq!(
        tree.below(root).len(),
        2,
        "hidden children are still children"
    );
}

#[test]
fn a_stale_id_names_nothing() {
    let (mut tree, root) = tree(1);
    let first = leaf(&mut tree, root, &[1]);
    let id = tree.id(first);
    tree.remove(first);
    let again = leaf(&mut tree, root, &[2]);
    assert_eq!(again, id.index, "the place is used again");
    assert!(tree.get(id).is_none(), "the name is not");
}
