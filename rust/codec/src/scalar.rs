//! The oracle: the contract, one element at a time.

use crate::element::{Bf16, Element, dequantize, quantize, scale};
use crate::raw::{Item, Tile};
use crate::spec::{Format, Layout, Spec};

/// Encodes one head; says whether it reloads finite.
pub(crate) fn store<E: Element>(spec: &Spec, item: Item<'_>) -> bool {
    match spec.format() {
        Format::Native => store_native::<E>(item),
        Format::Bf16 => store_bf16::<E>(item),
        Format::Int8 => store_int8::<E>(spec.layout, item),
    }
}

/// Decodes one head.
pub(crate) fn load<E: Element>(spec: &Spec, item: Item<'_>) {
    match spec.format() {
        Format::Native => load_native(item),
        Format::Bf16 => convert::<Bf16, E>(item),
        Format::Int8 => load_int8::<E>(spec.layout, item),
    }
}

fn is_finite<E: Element>(bits: u32) -> bool {
    E::abs(bits) <= E::LARGEST
}

fn store_native<E: Element>(item: Item<'_>) -> bool {
    let source = item.source;
    load_native(item);
    elements::<E>(source).all(is_finite::<E>)
}

fn load_native(mut item: Item<'_>) {
    for row in 0..item.source.rows() {
        item.target.row(row).copy_from_slice(item.source.row(row));
    }
}

fn store_bf16<E: Element>(item: Item<'_>) -> bool {
    let source = item.source;
    convert::<E, Bf16>(item);
    elements::<E>(source).all(|bits| {
        let reloaded = E::round(Bf16::to_f32(Bf16::round(E::to_f32(bits))));
        is_finite::<E>(reloaded)
    })
}

fn convert<From: Element, To: Element>(mut item: Item<'_>) {
    for row in 0..item.source.rows() {
        let source = item.source.row(row).chunks_exact(From::BYTES);
        let target = item.target.row(row).chunks_exact_mut(To::BYTES);
        for (x, y) in source.zip(target) {
            To::write(To::round(From::to_f32(From::read(x))), y);
        }
    }
}

fn store_int8<E: Element>(layout: Layout, mut item: Item<'_>) -> bool {
    let mut finite = true;
    for (channel, encoded) in item
        .target_scale
        .chunks_exact_mut(E::Scale::BYTES)
        .enumerate()
    {
        let places = || channel_places(layout, item.source, channel, E::BYTES);
        let at = |(row, column)| read_at::<E>(item.source, row, column);
        let amax = places().map(|place| E::abs(at(place))).max().unwrap_or(0);
        finite &= is_finite::<E>(amax);
        let bits = scale::<E>(amax);
        E::Scale::write(bits, encoded);
        for (row, column) in places() {
            let q = quantize(E::to_f32(at((row, column))), E::Scale::to_f32(bits));
            item.target.row(row)[column] = q.cast_unsigned();
        }
    }
    finite
}

fn load_int8<E: Element>(layout: Layout, mut item: Item<'_>) {
    for (channel, encoded) in item.source_scale.chunks_exact(E::Scale::BYTES).enumerate() {
        let scale = E::Scale::to_f32(E::Scale::read(encoded));
        for (row, column) in channel_places(layout, item.source, channel, 1) {
            let q = item.source.row(row)[column].cast_signed();
            let target = &mut item.target.row(row)[column * E::BYTES..][..E::BYTES];
            E::write(dequantize::<E>(q, scale), target);
        }
    }
}

/// (row, column) of every element of a channel.
fn channel_places(
    layout: Layout,
    tile: Tile<'_>,
    channel: usize,
    element_bytes: usize,
) -> impl Iterator<Item = (usize, usize)> {
    let n = match layout {
        Layout::KLast => tile.rows(),
        Layout::VLast => tile.row(channel).len() / element_bytes,
    };
    (0..n).map(move |i| match layout {
        Layout::KLast => (i, channel),
        Layout::VLast => (channel, i),
    })
}

fn read_at<E: Element>(tile: Tile<'_>, row: usize, column: usize) -> u32 {
    E::read(&tile.row(row)[column * E::BYTES..][..E::BYTES])
}

fn elements<E: Element>(tile: Tile<'_>) -> impl Iterator<Item = u32> {
    (0..tile.rows()).flat_map(move |row| tile.row(row).chunks_exact(E::BYTES).map(E::read))
}
