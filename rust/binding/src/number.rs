//! Integers as Python has them, which may be negative or of any size.

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

use crate::errors::{Class, Failure, Result};

/// An integer argument: anything with `__index__`. A value that does not fit `T` is refused with
/// the argument's name.
pub(crate) struct Number<T>(std::result::Result<T, String>);

/// An unsigned integer of some width.
pub(crate) trait Unsigned {
    const BITS: u32;
}

impl Unsigned for u32 {
    const BITS: u32 = Self::BITS;
}

impl Unsigned for u64 {
    const BITS: u32 = Self::BITS;
}

impl Unsigned for usize {
    const BITS: u32 = Self::BITS;
}

impl<T: Unsigned> Number<T> {
    /// The value of the argument `name`.
    pub(crate) fn named(self, name: &str) -> Result<T> {
        self.named_or(Class::Misuse, name)
    }

    /// The same; what does not fit is of `class`.
    pub(crate) fn named_or(self, class: Class, name: &str) -> Result<T> {
        self.0.map_err(|digits| {
            Failure::Refused(
                class,
                format!("{name} {digits} is outside 0..2**{} - 1", T::BITS),
            )
        })
    }
}

impl<T> From<T> for Number<T> {
    fn from(value: T) -> Self {
        Self(Ok(value))
    }
}

impl<'a, 'py, T: FromPyObject<'a, 'py, Error = PyErr>> FromPyObject<'a, 'py> for Number<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match object.extract() {
            Ok(value) => Ok(Self(Ok(value))),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                Ok(Self(Err(digits(&object))))
            }
            Err(error) => Err(error),
        }
    }
}

/// A number for a message. Python refuses to print one of thousands of digits.
pub(crate) fn digits(number: &Bound<'_, PyAny>) -> String {
    number
        .str()
        .map_or_else(|_| "(too long to print)".into(), |text| text.to_string())
}
