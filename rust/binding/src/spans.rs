//! Keys of prompts with images, audio or embeddings.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView};
use radixstate::Span;

use crate::errors::{Class, Result};
use crate::number::Number;
use crate::tokens::Tokens;

/// Gives each digest of a span tokens of its own, which a cache compares like any others.
///
/// Remembers `capacity` digests. To forget one costs reuse and nothing else.
#[pyclass(frozen, module = "radixstate._native")]
pub(crate) struct SpanKeys(Mutex<radixstate::SpanKeys>);

#[pymethods]
impl SpanKeys {
    #[new]
    #[pyo3(signature = (capacity=65536.into()), text_signature = "(capacity=65536)")]
    fn new(capacity: Number<usize>) -> Result<Self> {
        let capacity = capacity.named_or(Class::Config, "capacity")?;
        Ok(Self(Mutex::new(radixstate::SpanKeys::new(capacity))))
    }

    /// The prompt as a cache is to compare it, as a read-only buffer of uint32: with the tokens of
    /// the digests in the place of those of the spans. `spans` are (start, end, digest) each, in
    /// order; a digest has at least 16 bytes. Every prompt of the cache has to pass through here,
    /// also one without spans.
    ///
    /// Raises ConfigError for a token of 2**31 or more, and for what is no span.
    #[pyo3(signature = (tokens, spans=Vec::new()), text_signature = "($self, tokens, spans=())")]
    fn key<'py>(
        &self,
        py: Python<'py>,
        tokens: Tokens,
        spans: Vec<(Number<usize>, Number<usize>, Vec<u8>)>,
    ) -> Result<Bound<'py, PyAny>> {
        let mut named = Vec::with_capacity(spans.len());
        for (start, end, digest) in spans {
            named.push((start.named("start")?, end.named("end")?, digest));
        }
        let spans: Vec<Span<'_>> = named
            .iter()
            .map(|(start, end, digest)| Span {
                positions: *start..*end,
                digest,
            })
            .collect();
        let tokens = tokens.into_vec(py)?;
        // Nothing in there panics halfway through a change. The lock ends with this line: to make an
        // object may collect garbage, so run Python code that comes here again.
        let key = (self.0.lock().unwrap_or_else(PoisonError::into_inner)).key(&tokens, &spans)?;
        let bytes: Vec<u8> = key.iter().flat_map(|token| token.to_ne_bytes()).collect();
        let view = PyMemoryView::from(&PyBytes::new(py, &bytes))?;
        Ok(view.call_method1("cast", ("I",))?)
    }

    fn __repr__(&self) -> String {
        "SpanKeys()".into()
    }
}
