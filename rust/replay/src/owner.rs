//! The owners of KV pages, for code that runs with each of them.

use radixstate::{
    Cache, Config, EngineOwned, EnginePages, Extended, Lease, LogicalPages, Misuse, OwnPages,
    PageOwner, Pending, PoolConfig, Published, Rejected, Reservation,
};

/// Who owns the KV pages, as a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    /// The cache.
    Cache,
    /// The engine.
    Engine,
    /// The engine, under numbers of the cache.
    Logical,
}

/// An owner that a test can be run with.
pub trait Owner: PageOwner {
    /// The same as a value.
    const WHO: Who;

    /// A pool of this owner.
    fn kv(sizes: PoolConfig) -> PoolConfig<Self>;

    /// The same geometry with this owner.
    fn config(config: Config) -> Config<Self> {
        let Config {
            page_size,
            checkpoint_stride,
            kv,
            active,
            checkpoints,
        } = config;
        Config {
            page_size,
            checkpoint_stride,
            kv: Self::kv(kv),
            active,
            checkpoints,
        }
    }
}

impl Owner for OwnPages {
    const WHO: Who = Who::Cache;

    fn kv(sizes: PoolConfig) -> PoolConfig {
        sizes
    }
}

impl Owner for EnginePages {
    const WHO: Who = Who::Engine;

    fn kv(sizes: PoolConfig) -> PoolConfig<Self> {
        PoolConfig::engine(sizes.capacity).bytes(sizes.unit_bytes)
    }
}

impl Owner for LogicalPages {
    const WHO: Who = Who::Logical;

    fn kv(sizes: PoolConfig) -> PoolConfig<Self> {
        PoolConfig::logical(sizes.capacity).bytes(sizes.unit_bytes)
    }
}

/// An engine that shares its pages, whether it names them or not.
pub trait Sharing: Owner + EngineOwned {
    /// See `Cache::extend`.
    ///
    /// # Errors
    ///
    /// As there.
    fn extend(
        cache: &mut Cache<Self>,
        lease: &Lease,
        tokens: &[u32],
        pages: &[u32],
    ) -> Result<Extended, Misuse>;

    /// See `Cache::reserve`.
    ///
    /// # Errors
    ///
    /// As there.
    fn reserve(
        cache: &mut Cache<Self>,
        lease: &Lease,
        tokens: &[u32],
        pages: &[u32],
    ) -> Result<Reservation, Misuse>;

    /// See `Cache::publish`.
    ///
    /// # Errors
    ///
    /// As there.
    fn publish(
        cache: &mut Cache<Self>,
        lease: &Lease,
        tokens: &[u32],
        pages: &[u32],
        pending: Pending,
    ) -> Result<Published, Rejected>;
}

impl Sharing for EnginePages {
    fn extend(
        cache: &mut Cache<Self>,
        lease: &Lease,
        tokens: &[u32],
        pages: &[u32],
    ) -> Result<Extended, Misuse> {
        cache.extend(lease, tokens, pages)
    }

    fn reserve(
        cache: &mut Cache<Self>,
        lease: &Lease,
        tokens: &[u32],
        pages: &[u32],
    ) -> Result<Reservation, Misuse> {
        cache.reserve(lease, tokens, pages)
    }

    fn publish(
        cache: &mut Cache<Self>,
        lease: &Lease,
        tokens: &[u32],
        pages: &[u32],
        pending: Pending,
    ) -> Result<Published, Rejected> {
        cache.publish(lease, tokens, pages, pending)
    }
}

impl Sharing for LogicalPages {
    fn extend(
        cache: &mut Cache<Self>,
        lease: &Lease,
        tokens: &[u32],
        _: &[u32],
    ) -> Result<Extended, Misuse> {
        cache.extend(lease, tokens)
    }

    fn reserve(
        cache: &mut Cache<Self>,
        lease: &Lease,
        tokens: &[u32],
        _: &[u32],
    ) -> Result<Reservation, Misuse> {
        cache.reserve(lease, tokens)
    }

    fn publish(
        cache: &mut Cache<Self>,
        lease: &Lease,
        tokens: &[u32],
        _: &[u32],
        pending: Pending,
    ) -> Result<Published, Rejected> {
        cache.publish(lease, tokens, pending)
    }
}
