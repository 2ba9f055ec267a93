//! Tokens and page ids as Python has them: lists, buffers, torch tensors, any iterable of integers.
//!
//! A buffer of u32 is read in place; every other source is converted, with a range check, into
//! memory that the thread uses again and again: new memory of this size would cost more in page
//! faults than the conversion.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::fmt::Display;
use std::{ptr, slice};

use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::exceptions::{PyBufferError, PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyMemoryView, PyTuple};
use pyo3::{ffi, intern};

use crate::errors::{Class, Failure, Result};
use crate::gather::reserve;
use crate::number::digits;

/// The tokens of one call.
pub(crate) enum Tokens {
    /// A C-contiguous, aligned, one-dimensional buffer of native u32; its owner is kept from
    /// resizing it.
    Lent(PyUntypedBuffer),
    Converted(Converted),
}

/// Numbers of another type as u32. Dropping it leaves the memory to the thread's next conversion.
pub(crate) struct Converted(Vec<u32>);

thread_local!(static SPARE: Cell<Vec<u32>> = const { Cell::new(Vec::new()) });

impl Converted {
    /// Prompts beyond this are rare, and their memory is not kept.
    const MOST_KEPT: usize = 1 << 21;

    /// Nothing yet, with room for `count` numbers.
    fn with_room(count: usize) -> PyResult<Self> {
        let mut numbers = Self(SPARE.try_with(Cell::take).unwrap_or_default());
        numbers.0.clear();
        reserve(&mut numbers.0, count)?;
        Ok(numbers)
    }
}

impl Drop for Converted {
    fn drop(&mut self) {
        if self.0.capacity() <= Self::MOST_KEPT {
            let numbers = std::mem::take(&mut self.0);
            // Where a thread is ending there is no next conversion.
            _ = SPARE.try_with(|spare| spare.set(numbers));
        }
    }
}

/// Page ids of one call. A number that can't be an id is reported as a page, not as a token.
pub(crate) struct Pages(pub(crate) Vec<u32>);

impl Tokens {
    /// The tokens, in place.
    ///
    /// # Safety
    /// Until the slice is gone, the calling thread
    /// - stays attached to the interpreter, and
    /// - runs no Python code,
    ///
    /// so that nobody who follows Python's rules writes to the buffer.
    pub(crate) unsafe fn as_slice(&self) -> &[u32] {
        match self {
            Self::Converted(tokens) => &tokens.0,
            Self::Lent(buffer) if buffer.item_count() == 0 => &[],
            // SAFETY: `read_buffer` has seen that the buffer holds `item_count` aligned, contiguous
            // u32; it stays exported, so allocated, while `self` lives; the caller sees
            // to it that nothing writes.
            Self::Lent(buffer) => unsafe {
                slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.item_count())
            },
        }
    }

    /// The tokens as a vector of their own.
    pub(crate) fn into_vec(self, _attached: Python<'_>) -> PyResult<Vec<u32>> {
        match self {
            Self::Converted(mut tokens) => Ok(std::mem::take(&mut tokens.0)),
            Self::Lent(_) => {
                // SAFETY: `_attached` proves that this thread is attached, and neither a
                // reservation that succeeds nor a copy runs Python code.
                let tokens = unsafe { self.as_slice() };
                let mut copy = Vec::new();
                reserve(&mut copy, tokens.len())?;
                copy.extend_from_slice(tokens);
                Ok(copy)
            }
        }
    }
}

impl FromPyObject<'_, '_> for Tokens {
    type Error = Failure;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> Result<Self> {
        read(&object)
            .map_err(|unfit| unfit.into_failure("token", Class::TokenRange, "0..2**32 - 1"))
    }
}

impl FromPyObject<'_, '_> for Pages {
    type Error = Failure;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> Result<Self> {
        match read(&object) {
            Ok(ids) => Ok(Self(ids.into_vec(object.py())?)),
            Err(unfit) => Err(unfit.into_failure("kv page", Class::PageOwnership, "1..=capacity")),
        }
    }
}

type Read<T> = std::result::Result<T, Unfit>;

/// Why an object can't be read as numbers of 32 bits.
enum Unfit {
    Range { position: usize, value: String },
    Memory(String),
    Python(PyErr),
}

impl Unfit {
    fn into_failure(self, what: &str, range: Class, bounds: &str) -> Failure {
        match self {
            Self::Range { position, value } => Failure::Refused(
                range,
                format!("{what} {value} at position {position} is outside {bounds}"),
            ),
            Self::Memory(why) => Failure::Refused(Class::Tensor, format!("{what}s: {why}")),
            Self::Python(error) => Failure::Python(error),
        }
    }
}

impl From<PyErr> for Unfit {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

fn read(object: &Bound<'_, PyAny>) -> Read<Tokens> {
    if let Ok(list) = object.cast::<PyList>() {
        return read_list(list);
    }
    // SAFETY: this looks at nothing but the type of an object that is alive.
    if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1 {
        return match buffer_of(object) {
            Ok(buffer) => read_buffer(buffer),
            Err(error) => Err(unreadable(object.py(), error)),
        };
    }
    if is_tensor(object)? {
        return read_tensor(object);
    }
    let items = object.try_iter()?;
    read_items(Converted::with_room(expected(object, &items)?)?, items)
}

/// The buffer of an object. A ctypes array leaves its strides out, as an exporter of contiguous
/// memory may, and `PyUntypedBuffer` takes that for a fault; a view of it has them.
pub(crate) fn buffer_of(object: &Bound<'_, PyAny>) -> PyResult<PyUntypedBuffer> {
    PyUntypedBuffer::get(object).or_else(|error| {
        if !error.is_instance_of::<PyBufferError>(object.py()) {
            return Err(error);
        }
        PyUntypedBuffer::get(PyMemoryView::from(object)?.as_any())
    })
}

fn unreadable(py: Python<'_>, error: PyErr) -> Unfit {
    if error.is_instance_of::<PyBufferError>(py) {
        return Unfit::Memory(format!("no readable buffer: {}", error.value(py)));
    }
    error.into()
}

/// How many items to make room for. The length of what has one is taken at its word, so that what
/// no memory holds is refused at once; any other count is a hint.
fn expected<'py>(
    object: &Bound<'py, PyAny>,
    items: &impl Iterator<Item = PyResult<Bound<'py, PyAny>>>,
) -> PyResult<usize> {
    match object.len() {
        Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => {
            Ok(items.size_hint().0.min(Converted::MOST_KEPT))
        }
        length => length,
    }
}

/// Numbers of a list. Those before the first that is not an `int` of 32 bits are read without a
/// reference, a look at the list or a conversion by its type for each: that is a third of the time.
fn read_list(list: &Bound<'_, PyList>) -> Read<Tokens> {
    let mut numbers = Converted::with_room(list.len())?;
    for index in 0..list.len() {
        // SAFETY: the index is in the list, whose item stays alive while no Python code runs: none does
        // before it was read, as reading an object whose type is `int` itself runs none.
        let number = unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), index as ffi::Py_ssize_t);
            exact_int(item)
        };
        let Some(number) = number else { break };
        numbers.0.push(number);
    }
    let rest = numbers.0.len()..;
    // The length is asked each time: reading what is no `int` runs code that may change it.
    let items = rest.map_while(|index| (index < list.len()).then(|| list.get_item(index)));
    read_items(numbers, items)
}

/// The value of an object whose type is `int` and no subclass, if it fits.
///
/// # Safety
/// The thread is attached, and `item` is an object that is alive.
unsafe fn exact_int(item: *mut ffi::PyObject) -> Option<u32> {
    let mut overflow = 0;
    // SAFETY: the caller owes the same; an overflow is told without an exception.
    let number = unsafe {
        if ffi::Py_TYPE(item) != &raw mut ffi::PyLong_Type {
            return None;
        }
        ffi::PyLong_AsLongAndOverflow(item, &raw mut overflow)
    };
    (overflow == 0).then(|| number.try_into().ok()).flatten()
}

/// Appends the numbers that `items` yields.
fn read_items<'py>(
    mut numbers: Converted,
    items: impl Iterator<Item = PyResult<Bound<'py, PyAny>>>,
) -> Read<Tokens> {
    for (position, item) in (numbers.0.len()..).zip(items) {
        let item = item?;
        if numbers.0.len() == numbers.0.capacity() {
            // What is longer than it said may have no end: let it be interrupted.
            item.py().check_signals()?;
            reserve(&mut numbers.0, 1)?;
        }
        match item.extract::<u32>() {
            Ok(number) => numbers.0.push(number),
            Err(error) if error.is_instance_of::<PyOverflowError>(item.py()) => {
                return Err(Unfit::Range {
                    position,
                    value: digits(&item),
                });
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Tokens::Converted(numbers))
}

/// The element types that tokens come in.
#[derive(Clone, Copy)]
pub(crate) enum Element {
    U32,
    I32,
    U64,
    I64,
}

impl Element {
    fn size(self) -> usize {
        match self {
            Self::U32 | Self::I32 => 4,
            Self::U64 | Self::I64 => 8,
        }
    }

    /// By format of the buffer protocol. `PyBuffer<T>` is no help here: it takes big-endian numbers
    /// for native ones.
    pub(crate) fn of_format(format: &CStr) -> Option<Self> {
        let foreign: &[u8] = if cfg!(target_endian = "little") {
            b">!"
        } else {
            b"<"
        };
        if format
            .to_bytes()
            .first()
            .is_some_and(|order| foreign.contains(order))
        {
            return None;
        }
        match ElementType::from_format(format) {
            ElementType::UnsignedInteger { bytes: 4 } => Some(Self::U32),
            ElementType::SignedInteger { bytes: 4 } => Some(Self::I32),
            ElementType::UnsignedInteger { bytes: 8 } => Some(Self::U64),
            ElementType::SignedInteger { bytes: 8 } => Some(Self::I64),
            _ => None,
        }
    }

    /// By name of the torch dtype.
    fn of_dtype(name: &str) -> Option<Self> {
        match name {
            "torch.uint32" => Some(Self::U32),
            "torch.int32" => Some(Self::I32),
            "torch.uint64" => Some(Self::U64),
            "torch.int64" => Some(Self::I64),
            _ => None,
        }
    }
}

/// A page id as kernels read it.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct PageId(i32);

impl From<u32> for PageId {
    fn from(id: u32) -> Self {
        Self(id as i32)
    }
}

// SAFETY: it is an i32, and any four bytes are one.
unsafe impl pyo3::buffer::Element for PageId {
    /// Not that of `i32`, to which little-endian numbers are foreign on any machine.
    fn is_compatible_format(format: &CStr) -> bool {
        matches!(Element::of_format(format), Some(Element::I32))
    }
}

/// Contiguous, aligned numbers at an address.
struct Memory {
    address: *const c_void,
    count: usize,
    element: Element,
}

impl Memory {
    /// Checks what a buffer or tensor says of itself.
    fn new(
        address: *const c_void,
        count: usize,
        element: Element,
        dimensions: usize,
        contiguous: bool,
    ) -> Read<Self> {
        let unfit = |why: String| Err(Unfit::Memory(why));
        if dimensions != 1 {
            return unfit(format!("1 dimension expected, got {dimensions}"));
        }
        if !contiguous {
            return unfit("contiguous memory expected, got a strided view".into());
        }
        // No numbers may be anywhere: an empty array is at an odd address, an empty tensor at 0. A
        // fake one is too.
        if count > 0 && (address.is_null() || !address.addr().is_multiple_of(element.size())) {
            return unfit(format!(
                "{count} numbers at address {:#x} can't be of {} bytes",
                address.addr(),
                element.size()
            ));
        }
        Ok(Self {
            address,
            count,
            element,
        })
    }

    /// Copies the numbers.
    ///
    /// # Safety
    /// - The address holds `count` numbers of that type.
    /// - Nothing writes to them meanwhile.
    unsafe fn convert(&self) -> Read<Converted> {
        if self.count == 0 {
            return Ok(Converted(Vec::new()));
        }
        let Self {
            address,
            count,
            element,
        } = *self;
        // SAFETY: the caller vouches for all but the alignment, which `new` has checked.
        unsafe {
            match element {
                Element::U32 => {
                    let mut copy = Converted::with_room(count)?;
                    copy.0
                        .extend_from_slice(slice::from_raw_parts(address.cast::<u32>(), count));
                    Ok(copy)
                }
                Element::I32 => narrow(slice::from_raw_parts(address.cast::<i32>(), count)),
                Element::U64 => narrow(slice::from_raw_parts(address.cast::<u64>(), count)),
                Element::I64 => narrow(slice::from_raw_parts(address.cast::<i64>(), count)),
            }
        }
    }
}

fn wrong_type(got: impl Display) -> Unfit {
    Unfit::Memory(format!(
        "native int32, int64, uint32 or uint64 expected, got {got}"
    ))
}

fn read_buffer(buffer: PyUntypedBuffer) -> Read<Tokens> {
    let format = buffer.format();
    let element = Element::of_format(format).filter(|element| element.size() == buffer.item_size());
    let element = element.ok_or_else(|| wrong_type(format.to_string_lossy()))?;
    let (dimensions, contiguous) = (buffer.dimensions(), buffer.is_c_contiguous());
    let memory = Memory::new(
        buffer.buf_ptr(),
        buffer.item_count(),
        element,
        dimensions,
        contiguous,
    )?;
    if let Element::U32 = element {
        return Ok(Tokens::Lent(buffer));
    }
    // SAFETY: the exporter says what is there and can't move it before `buffer` is dropped; this
    // thread is attached to the interpreter and runs no Python code meanwhile.
    unsafe { memory.convert() }.map(Tokens::Converted)
}

fn read_tensor(object: &Bound<'_, PyAny>) -> Read<Tokens> {
    let py = object.py();
    let dtype = object.getattr(intern!(py, "dtype"))?.str()?;
    let element = Element::of_dtype(&dtype.to_string_lossy()).ok_or_else(|| wrong_type(dtype))?;
    if !object.getattr(intern!(py, "is_cpu"))?.extract::<bool>()? {
        let device = object.getattr(intern!(py, "device"))?;
        return Err(Unfit::Memory(format!(
            "a cpu tensor expected, got one on {device}"
        )));
    }
    if object.call_method0(intern!(py, "is_neg"))?.extract()? {
        return Err(Unfit::Memory(
            "its memory holds the negated numbers: give tensor.resolve_neg()".into(),
        ));
    }
    let shape = object
        .getattr(intern!(py, "shape"))?
        .cast_into::<PyTuple>()
        .map_err(PyErr::from)?;
    let count = match shape.len() {
        1 => shape.get_item(0)?.extract()?,
        _ => 0,
    };
    let contiguous = object
        .call_method0(intern!(py, "is_contiguous"))?
        .extract()?;
    let storage = object.call_method0(intern!(py, "untyped_storage"))?;
    let stored: usize = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
    let offset: usize = object
        .call_method0(intern!(py, "storage_offset"))?
        .extract()?;
    let address: usize = object.call_method0(intern!(py, "data_ptr"))?.extract()?;
    let memory = Memory::new(
        ptr::with_exposed_provenance(address),
        count,
        element,
        shape.len(),
        contiguous,
    )?;
    let needed = offset.saturating_add(count).saturating_mul(element.size());
    if count > 0 && needed > stored {
        return Err(Unfit::Memory(format!(
            "the tensor needs {needed} bytes of its storage, which has {stored}"
        )));
    }
    // SAFETY: torch says what is there, and its storage is as large as that; `object` keeps it
    // alive, and since it was asked for its address no Python code has run that could resize it.
    // This thread is attached to the interpreter.
    unsafe { memory.convert() }.map(Tokens::Converted)
}

/// Whether this is a `torch.Tensor`. Where torch was never imported there are none.
pub(crate) fn is_tensor(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    static TENSOR: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = object.py();
    if let Some(class) = TENSOR.get(py) {
        return object.is_instance(class.bind(py));
    }
    let modules = py
        .import(intern!(py, "sys"))?
        .getattr(intern!(py, "modules"))?;
    let Some(torch) = modules.cast::<PyDict>()?.get_item(intern!(py, "torch"))? else {
        return Ok(false);
    };
    let class = torch.getattr(intern!(py, "Tensor"))?;
    object.is_instance(TENSOR.get_or_init(py, || class.unbind()).bind(py))
}

/// A signed or unsigned integer.
trait Integer: Copy + Display {
    /// Its two's complement in 64 bits: above 32 bits exactly for what no u32 equals.
    fn bits(self) -> u64;
}

impl Integer for i32 {
    fn bits(self) -> u64 {
        i64::from(self) as u64
    }
}

impl Integer for i64 {
    fn bits(self) -> u64 {
        self as u64
    }
}

impl Integer for u64 {
    fn bits(self) -> u64 {
        self
    }
}

/// Converts in one pass that the compiler vectorises; looks for the culprit only when there is one.
fn narrow<T: Integer>(numbers: &[T]) -> Read<Converted> {
    let mut narrowed = Converted::with_room(numbers.len())?;
    let mut seen = 0;
    narrowed.0.extend(numbers.iter().map(|number| {
        seen |= number.bits();
        number.bits() as u32
    }));
    if seen >> 32 == 0 {
        return Ok(narrowed);
    }
    let position = numbers
        .iter()
        .position(|number| number.bits() >> 32 != 0)
        .expect("one of them set the bits seen");
    Err(Unfit::Range {
        position,
        value: numbers[position].to_string(),
    })
}
