use super::*;

#[test]
fn the_lowest_free_slots_are_handed_out_from_one_and_never_zero() {
    let mut pool = Pool::<ActiveState>::new(PoolConfig::internal(5));
    let mut slots = pool.take_many(3).unwrap();
    assert_eq!(slots.ids().collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(pool.take().unwrap().id(), 4);
    pool.release(slots.split_off(1));
    pool.release(slots);
    assert_eq!(
        pool.take_many(4).unwrap().ids().collect::<Vec<_>>(),
        [1, 2, 3, 5]
    );
    let short = pool.take().unwrap_err();
    assert_eq!(
        short.to_string(),
        "active pool: wanted 1, 0 free, 0 evictable, 0 retiring"
    );
    assert_eq!(
        pool.usage(),
        Usage {
            capacity: 5,
            held: 5,
            ..Usage::default()
        }
    );
}

#[test]
fn taking_more_than_free_takes_none() {
    let mut pool = Pool::<KvPage>::new(PoolConfig::internal(2));
    assert!(pool.take_many(3).is_err());
    assert_eq!(pool.usage().free, 2);
}

#[test]
#[should_panic(
    expected = "a slot has exactly one owner: kv Run { first: 2, count: 1 } is freed twice"
)]
fn a_slot_that_is_free_is_not_freed_again() {
    let mut pool = Pool::<KvPage>::new(PoolConfig::internal(2));
    let _slots = pool.take_many(2).unwrap();
    pool.release(Slots::forged(2));
    pool.release(Slots::forged(2));
}

#[test]
fn the_last_id_of_the_largest_pool_is_an_id_like_others() {
    let mut pool = Pool::<KvPage>::new(PoolConfig::internal(u32::MAX));
    let mut slots = pool.take_many(u32::MAX as usize - 1).unwrap();
    slots.append(pool.take().unwrap().into());
    assert_eq!(
        (slots.ids().next_back(), slots.len()),
        (Some(u32::MAX), u32::MAX as usize)
    );
    assert!(pool.take().is_err());
}

#[test]
fn a_pool_of_the_engine_adopts_only_what_the_engine_owns() {
    let mut pool = Pool::<KvPage>::new(pool_of(2));
    assert!(pool.check_adoptable(2, &[1, 2]).is_ok());
    let page = pool.adopt(1, &[1]);
    for (ids, why) in [
        (vec![1], "already belongs"),
        (vec![3], "outside"),
        (vec![0], "outside"),
        (vec![2, 2], "twice"),
    ] {
        let error = pool
            .check_adoptable(ids.len(), &ids)
            .unwrap_err()
            .to_string();
        assert!(error.contains(why), "{error}");
    }
    pool.release(page);
    assert!(
        pool.check_adoptable(1, &[1]).is_err(),
        "in the outbox it is still the cache's"
    );
    assert!(pool.take_outbox().ids().eq([1]));
    assert!(pool.check_adoptable(1, &[1]).is_ok());
    let pages = pool.adopt(2, &[2, 1]);
    pool.hand_back(pages);
    assert_eq!(pool.usage(), Pool::<KvPage>::new(pool_of(2)).usage());
    assert!(pool.check_adoptable(2, &[1, 2]).is_ok());
}

fn pool_of(capacity: u32) -> PoolConfig<EnginePages> {
    PoolConfig::engine(capacity)
}

#[test]
fn a_number_is_free_again_once_the_engine_has_taken_it() {
    let mut pool = Pool::<KvPage>::new(PoolConfig::logical(3));
    let pages = pool.adopt(2, &[]);
    assert!(pages.ids().eq([1, 2]));
    pool.release(pages);
    let more = pool.adopt(1, &[]);
    assert!(more.ids().eq([3]), "1 and 2 wait for the engine");
    let error = pool.check_adoptable(1, &[]).unwrap_err();
    assert_eq!(
        error,
        Misuse::TooManyPages {
            wanted: 1,
            free: 0,
            outbox: 2
        }
    );
    pool.hand_back(more);
    assert!(pool.take_outbox().ids().eq([1, 2]));
    assert_eq!(pool.usage().free, 3);
    assert!(pool.take_outbox().is_empty(), "once");
}
