//! The constructors' numbers.

use radixstate::{Cache, Config, PageOwner, PoolConfig, policy};

use crate::errors::{Class, Failure, Result};
use crate::number::Number;

/// A geometry, and of each pool the slots and the bytes of one, as Python gave them.
pub(crate) struct Sizes {
    pub(crate) page_size: Number<u32>,
    pub(crate) checkpoint_stride: Number<u32>,
    pub(crate) kv: (Number<u32>, Number<u64>),
    pub(crate) active: (Number<u32>, Number<u64>),
    pub(crate) checkpoints: (Number<u32>, Number<u64>),
}

impl Sizes {
    /// An empty cache with these sizes, whose KV pages are of the kind that `kv` makes.
    pub(crate) fn cache<O: PageOwner>(
        self,
        kv: impl FnOnce(u32) -> PoolConfig<O>,
        policy: &str,
    ) -> Result<Cache<O>> {
        let size = |number: Number<u32>, name| number.named_or(Class::Config, name);
        let bytes = |number: Number<u64>, name| number.named_or(Class::Config, name);
        let page_size = size(self.page_size, "page_size")?;
        let checkpoint_stride = size(self.checkpoint_stride, "checkpoint_stride")?;
        let kv = kv(size(self.kv.0, "kv_pages")?);
        let active = PoolConfig::internal(size(self.active.0, "active_slots")?);
        let checkpoints = PoolConfig::internal(size(self.checkpoints.0, "checkpoint_slots")?);
        let config = Config {
            page_size,
            checkpoint_stride,
            kv: kv.bytes(bytes(self.kv.1, "kv_page_bytes")?),
            active: active.bytes(bytes(self.active.1, "active_bytes")?),
            checkpoints: checkpoints.bytes(bytes(self.checkpoints.1, "checkpoint_bytes")?),
        };
        let Some(order) = policy::by_name(policy) else {
            let known = policy::NAMES.join(", ");
            let message = format!("policy must be one of {known}, got {policy:?}");
            return Err(Failure::Refused(Class::Config, message));
        };
        Ok(Cache::with_policy(config, order)?)
    }
}
