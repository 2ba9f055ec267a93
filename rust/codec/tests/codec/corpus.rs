//! Replays the committed corpus of the fuzz target `codec`. A link brings it into the crate and its package.

use std::collections::BTreeMap;
use std::path::Path;

use crate::replay::{Subject, replay};

#[test]
fn every_input_of_the_corpus_keeps_the_contract() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let mut subjects: BTreeMap<Subject, u32> = BTreeMap::new();
    for entry in std::fs::read_dir(&corpus).expect("the corpus is committed") {
        let path = entry.expect("a readable folder").path();
        println!("{}", path.display());
        let subject =
            replay(&std::fs::read(&path).expect("a readable file")).expect("any bytes do");
        *subjects.entry(subject).or_default() += 1;
    }
    println!("{subjects:?}");
    for subject in [
        Subject::Contract,
        Subject::Backends,
        Subject::SpecAccepted,
        Subject::SpecRefused,
    ] {
        let inputs = subjects.get(&subject).copied().unwrap_or_default();
        assert!(
            inputs >= 5,
            "{inputs} inputs about {subject:?}: {subjects:?}"
        );
    }
}
