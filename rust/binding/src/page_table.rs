//! Where page ids are written for kernels.

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::errors::{Class, Failure, Result};
use crate::tokens::{Element, PageId, buffer_of};

/// Where the page ids of one call are written: a contiguous, writable buffer of native int32.
pub(crate) struct PageTable(PyBuffer<PageId>);

impl FromPyObject<'_, '_> for PageTable {
    type Error = Failure;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> Result<Self> {
        let unfit = |got: String| {
            Failure::Refused(
                Class::Tensor,
                format!("pages: a contiguous, writable buffer of int32 expected, got {got}"),
            )
        };
        let buffer =
            buffer_of(&object).map_err(|error| unfit(error.value(object.py()).to_string()))?;
        let format = buffer.format().to_string_lossy().into_owned();
        match Element::of_format(buffer.format()) {
            Some(Element::I32) if !buffer.readonly() && buffer.is_c_contiguous() => buffer
                .into_typed()
                .map(Self)
                .map_err(|_| unfit("one that is not aligned to 4 bytes".into())),
            Some(Element::I32) => Err(unfit("one that is read-only or strided".into())),
            _ => Err(unfit(format!("elements of format {format:?}"))),
        }
    }
}

impl PageTable {
    /// Fails if there is no room for so many ids.
    pub(crate) fn require(&self, ids: usize) -> Result<()> {
        let room = self.0.item_count();
        if ids <= room {
            return Ok(());
        }
        let message = format!("pages: {ids} are to be written, the buffer has room for {room}");
        Err(Failure::Refused(Class::LengthMismatch, message))
    }

    /// Writes the ids from the start on and returns how many they are, or writes nothing.
    pub(crate) fn write(&self, py: Python<'_>, ids: &[u32]) -> Result<usize> {
        self.require(ids.len())?;
        let cells = self
            .0
            .as_mut_slice(py)
            .expect("extraction has seen that it is contiguous and writable");
        cells
            .iter()
            .zip(ids)
            .for_each(|(cell, &id)| cell.set(id.into()));
        Ok(ids.len())
    }
}
