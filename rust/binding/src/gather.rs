//! Vectors of what Python iterates over. No length that an object gives is trusted: memory grows
//! with what really comes, and what does not fit is a MemoryError.

use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

/// Makes room for `more` further items.
pub(crate) fn reserve<T>(items: &mut Vec<T>, more: usize) -> PyResult<()> {
    let room = items.try_reserve(more);
    room.map_err(|_| PyMemoryError::new_err(format!("no memory for {more} further items")))
}

/// Converts the items of any iterable.
pub(crate) fn gather<'py, T, E: From<PyErr>>(
    object: &Bound<'py, PyAny>,
    mut convert: impl FnMut(Bound<'py, PyAny>) -> Result<T, E>,
) -> Result<Vec<T>, E> {
    let mut gathered = Vec::new();
    for item in object.try_iter()? {
        if gathered.len() == gathered.capacity() {
            // What has no end can be interrupted.
            object.py().check_signals()?;
            reserve(&mut gathered, 1)?;
        }
        gathered.push(convert(item?)?);
    }
    Ok(gathered)
}
