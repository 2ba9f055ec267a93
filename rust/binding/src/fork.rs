//! Notices forks. What a cache owns belongs to the process that made it: a child has a copy of the
//! books, and would hand out the same slots of the same device memory.

use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{Class, Failure, Result};

/// Forks between the first process that loaded this module and this one.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Names this process among its ancestors. A load, where asking for the process id would be a
/// system call.
pub(crate) fn process() -> u64 {
    FORKS.load(Ordering::Relaxed)
}

/// Refuses what was made in another process, which `made_in` names.
pub(crate) fn check(made_in: u64, what: &str) -> Result<()> {
    if made_in == process() {
        return Ok(());
    }
    let rule =
        format!("this {what} belongs to the process that made it: a forked child makes its own");
    Err(Failure::Refused(Class::Forked, rule))
}

#[pyfunction]
fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Asks Python to say when it has forked, on systems that can.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let os = module.py().import("os")?;
    if let Ok(register) = os.getattr("register_at_fork") {
        let hooks = PyDict::new(module.py());
        hooks.set_item("after_in_child", wrap_pyfunction!(forked, module)?)?;
        register.call((), Some(&hooks))?;
    }
    Ok(())
}
