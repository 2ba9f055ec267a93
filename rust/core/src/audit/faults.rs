//! Seeded bugs: tests of this crate switch one on and show that `check()` finds it.
//!
//! Outside of unit tests [`seeded`] is a constant `false` and costs nothing.

/// One bug, at the place in the real code that asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A freed slot does not reach the free list.
    LostSlot,
    /// A checkpoint withdrawn while it is pinned is freed at once.
    EarlyFree,
    /// A pinned checkpoint stays in the eviction order.
    IgnoredPin,
    /// A pin walks up without moving the pages between the counters.
    WrongCounter,
    /// A split leaves the pins with the upper half.
    PinsOnUpperHalf,
    /// Removing a node leaves it in the table of children.
    StaleChild,
    /// A split is never undone.
    SplitForGood,
}

#[cfg(not(test))]
#[inline(always)]
pub(crate) fn seeded(_: Fault) -> bool {
    false
}

#[cfg(test)]
pub(crate) use switch::{seeded, with};

#[cfg(test)]
mod switch {
    use std::cell::Cell;

    use super::Fault;

    thread_local!(static ACTIVE: Cell<Option<Fault>> = const { Cell::new(None) });

    pub(crate) fn seeded(fault: Fault) -> bool {
        ACTIVE.get() == Some(fault)
    }

    /// Runs `body` with `fault` in force.
    pub(crate) fn with<T>(fault: Fault, body: impl FnOnce() -> T) -> T {
        ACTIVE.set(Some(fault));
        let result = body();
        ACTIVE.set(None);
        result
    }
}
