//! Replays the committed corpus of the fuzz target `operations`.

use std::path::Path;

use crate::replay::replay;

#[test]
fn every_input_of_the_corpus_agrees_with_the_naive_cache() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/operations");
    let (mut inputs, mut hits, mut evicted) = (0, 0, 0);
    for entry in std::fs::read_dir(&corpus).expect("the corpus is committed") {
        let path = entry.expect("a readable folder").path();
        println!("{}", path.display());
        let stats = replay(&std::fs::read(&path).expect("a readable file")).unwrap_or_default();
        inputs += 1;
        hits += stats.hits;
        evicted += stats.evictions.for_kv.kv + stats.evictions.for_checkpoint.checkpoints;
    }
    println!("{inputs} inputs, {hits} hits, {evicted} units evicted");
    assert!(
        inputs >= 100 && hits >= 100 && evicted >= 100,
        "{inputs} inputs, {hits} hits, {evicted} evicted"
    );
}
