//! The way into the core: one process, one panic, no Python code meanwhile.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use radixstate::{Cache, EnginePages, LogicalPages};

use crate::errors::{Class, Failure, Result};
use crate::fork;
use crate::tokens::Tokens;

/// A core, by who owns its pages. The Python class that made it decides which.
pub(crate) enum Core {
    Own(Cache),
    Engine(Cache<EnginePages>),
    Logical(Cache<LogicalPages>),
}

/// Does the same with whatever core it is.
macro_rules! each {
    ($core:expr, $cache:ident => $call:expr) => {
        match $core {
            $crate::gate::Core::Own($cache) => $call,
            $crate::gate::Core::Engine($cache) => $call,
            $crate::gate::Core::Logical($cache) => $call,
        }
    };
}
pub(crate) use each;

/// Does the same with whatever core of an `EngineCache` it is.
macro_rules! each_engine {
    ($core:expr, $cache:ident => $call:expr) => {
        match $core {
            $crate::gate::Core::Own(_) => unreachable!("an EngineCache has pages of the engine"),
            $crate::gate::Core::Engine($cache) => $call,
            $crate::gate::Core::Logical($cache) => $call,
        }
    };
}
pub(crate) use each_engine;

impl Core {
    /// The core of a `Cache`.
    pub(crate) fn own(&mut self) -> &mut Cache {
        match self {
            Self::Own(cache) => cache,
            Self::Engine(_) | Self::Logical(_) => unreachable!("a Cache owns its pages"),
        }
    }
}

/// A core, or the invariant that a bug of it broke. Only the process that made it may call it, and
/// nobody after a panic.
///
/// Every call keeps the GIL; the mutex is never contended, and no Python code runs under it.
pub(crate) struct Gate {
    core: Mutex<std::result::Result<Core, String>>,
    /// The process that made it.
    process: u64,
}

impl Gate {
    pub(crate) fn new(core: Core) -> Self {
        Self {
            core: Mutex::new(Ok(core)),
            process: fork::process(),
        }
    }

    /// Calls the core. A panic in there breaks this cache, and no other, for good.
    pub(crate) fn ask<T>(&self, call: impl FnOnce(&mut Core) -> T) -> Result<T> {
        fork::check(self.process, "cache")?;
        // The core's panics are caught below, so the mutex can't be poisoned halfway through a
        // change.
        let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = match &mut *core {
            Err(invariant) => return Err(poisoned(invariant)),
            // Whatever a panic leaves half done is dropped with the core.
            Ok(core) => catch_unwind(AssertUnwindSafe(|| call(core))),
        };
        outcome.map_err(|panic| {
            let invariant = text_of(panic);
            let failure = poisoned(&invariant);
            *core = Err(invariant);
            failure
        })
    }

    /// Calls an operation of the core that can fail.
    pub(crate) fn call<T, E>(
        &self,
        call: impl FnOnce(&mut Core) -> std::result::Result<T, E>,
    ) -> Result<T>
    where
        Failure: From<E>,
    {
        Ok(self.ask(call)??)
    }

    /// Calls an operation of the core with tokens, read in place.
    ///
    /// `call` is one operation of the core: it runs no Python code.
    pub(crate) fn ask_with<T>(
        &self,
        _attached: Python<'_>,
        tokens: &Tokens,
        call: impl FnOnce(&mut Core, &[u32]) -> T,
    ) -> Result<T> {
        // SAFETY: `_attached` proves that this thread is attached; the slice ends with `call`,
        // which neither detaches nor runs Python code.
        self.ask(|core| call(core, unsafe { tokens.as_slice() }))
    }

    /// The same for an operation that can fail.
    pub(crate) fn call_with<T, E>(
        &self,
        attached: Python<'_>,
        tokens: &Tokens,
        call: impl FnOnce(&mut Core, &[u32]) -> std::result::Result<T, E>,
    ) -> Result<T>
    where
        Failure: From<E>,
    {
        Ok(self.ask_with(attached, tokens, call)??)
    }
}

fn poisoned(invariant: &str) -> Failure {
    let message =
        format!("a bug broke an invariant, this cache refuses further calls: {invariant}");
    Failure::Refused(Class::Poisoned, message)
}

fn text_of(panic: Box<dyn Any + Send>) -> String {
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => panic
            .downcast_ref::<&str>()
            .unwrap_or(&"a panic without a message")
            .to_string(),
    }
}
