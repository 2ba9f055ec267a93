//! Python binding of radixstate: converts, calls, maps errors. Decides nothing.

mod cache;
mod codec;
mod config;
mod counters;
mod engine;
mod errors;
mod fork;
mod gate;
mod gather;
mod handles;
mod held;
mod number;
mod page_table;
mod request;
mod results;
mod sequences;
mod spans;
mod tensor;
mod tokens;

use pyo3::prelude::*;

/// The native core of radixstate.
// Tokens are read in place, which is sound because whoever writes to a buffer holds the GIL.
#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    errors::register(module)?;
    fork::register(module)?;
    module.add_class::<cache::CacheBase>()?;
    module.add_class::<sequences::Cache>()?;
    module.add_class::<engine::EngineCache>()?;
    module.add_class::<request::Namespace>()?;
    module.add_class::<request::StartRequest>()?;
    module.add_class::<spans::SpanKeys>()?;
    handles::register(module)?;
    results::register(module)?;
    counters::register(module)?;
    held::register(module)?;
    codec::register(module)
}
