//! What makes two prefixes the same, and what must keep them apart.

use radixstate::{PoolKind, Reason};

use crate::*;

fn store_in(cache: &mut Cache, namespace: &Namespace, tokens: &[u32]) {
    let Started { sequence, .. } = cache
        .start(namespace, tokens, StartOptions::default())
        .unwrap();
    cache.loaded(&sequence).unwrap();
    let depth = cache.legal_depth(tokens.len());
    checkpoint(cache, &sequence, depth);
    cache.finish(sequence).unwrap();
}

fn reused_in(cache: &mut Cache, namespace: &Namespace, tokens: &[u32]) -> usize {
    cache
        .lookup(namespace, &fork(tokens, 99, 1), None)
        .unwrap()
        .length
}

// radixark/miles #2783; InternLM/lmdeploy #4917; vllm-project/vllm #42125; ggml-org/llama.cpp
// #26207
#[test]
fn prefixes_of_older_weights_are_never_found_and_make_room() {
    let mut cache = cache(16, 1, 2);
    let [old, new] = [1, 2].map(|weights| Namespace::new(7, None, weights));
    store_in(&mut cache, &old, &prompt(1, 8));
    assert_eq!(
        cache.lookup(&new, &prompt(1, 9), None).unwrap().reason,
        Reason::NoPrefix
    );
    store_in(&mut cache, &new, &prompt(1, 8));
    store_in(&mut cache, &new, &prompt(1, 12));
    assert_eq!(
        [8, 12].map(|n| reused_in(&mut cache, &new, &prompt(1, n))),
        [8, 12]
    );
    assert_eq!(
        reused_in(&mut cache, &old, &prompt(1, 8)),
        0,
        "the oldest went first"
    );
    assert_eq!(cache.usage(PoolKind::Kv).evictable, 6, "with its pages");
    assert_sound(&mut cache);
}

// sgl-project/sglang #37160; LMCache/LMCache #4825
#[test]
fn one_tenant_never_finds_anothers_prefix_by_any_length() {
    let mut cache = cache(64, 1, 8);
    let [a, b] = ["a", "b"].map(|tenant| Namespace::new(0, Some(tenant), 0));
    store_in(&mut cache, &a, &prompt(1, 16));
    for n in 1..=17 {
        let other = cache.lookup(&b, &prompt(1, n), None).unwrap();
        assert_eq!(
            (other.length, other.kv_length, other.branch),
            (0, 0, None),
            "{n} tokens"
        );
    }
    assert_eq!(reused_in(&mut cache, &a, &prompt(1, 16)), 16);
}

// LMCache/LMCache #3301, #4086, #4783; ROCm/ATOM #1358; sgl-project/sglang #2151, #32404
#[test]
fn media_whose_ids_agree_in_most_bits_never_match() {
    let mut cache = cache(64, 1, 8);
    let media = |id: u128| (0..4).map(move |i| (id >> (32 * i)) as u32);
    let with = |id: u128| {
        prompt(1, 8)
            .into_iter()
            .chain(media(id))
            .chain(prompt(2, 4))
            .collect::<Vec<u32>>()
    };
    let id = 0x0123_4567_89ab_cdef_0123_4567_89ab_cdef_u128;
    store_at(&mut cache, &with(id), &[8, 12, 16]);
    assert_eq!(reused(&mut cache, &with(id)), 16);
    for bit in 0..128 {
        assert_eq!(
            reused(&mut cache, &with(id ^ 1 << bit)),
            8,
            "only bit {bit} differs"
        );
    }
}
