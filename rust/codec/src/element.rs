//! Numbers as bit patterns: reading and rounding. Knows no SIMD, no pools and no formats.

/// An element type of states or scales. Bit patterns are held in the low bits of a `u32`.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    /// Type of the scales of such a state.
    type Scale: Element;
    const BYTES: usize;
    /// Bits of the largest finite value.
    const LARGEST: u32;
    /// Bits of the canonical NaN.
    const NAN: u32;

    fn read(bytes: &[u8]) -> u32;
    fn write(bits: u32, bytes: &mut [u8]);
    fn to_f32(bits: u32) -> f32;
    /// Rounds to nearest even; every NaN becomes the canonical one.
    fn round(value: f32) -> u32;

    /// Bits without the sign: ordered like absolute values, with NaN above Inf above finite.
    fn abs(bits: u32) -> u32 {
        bits & (u32::MAX >> (33 - 8 * Self::BYTES))
    }

    fn is_finite(bits: u32) -> bool {
        Self::abs(bits) <= Self::LARGEST
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Bf16;
#[derive(Clone, Copy)]
pub(crate) struct Fp16;
#[derive(Clone, Copy)]
pub(crate) struct Fp32;

impl Element for Bf16 {
    type Scale = Self;
    const BYTES: usize = 2;
    const LARGEST: u32 = 0x7f7f;
    const NAN: u32 = 0x7fc0;

    fn read(bytes: &[u8]) -> u32 {
        read_u16(bytes)
    }

    fn write(bits: u32, bytes: &mut [u8]) {
        write_u16(bits, bytes);
    }

    fn to_f32(bits: u32) -> f32 {
        f32::from_bits(bits << 16)
    }

    fn round(value: f32) -> u32 {
        if value.is_nan() {
            return Self::NAN;
        }
        let bits = value.to_bits();
        let odd = (bits >> 16) & 1;
        (bits + 0x7fff + odd) >> 16
    }
}

impl Element for Fp16 {
    type Scale = Fp32;
    const BYTES: usize = 2;
    const LARGEST: u32 = 0x7bff;
    const NAN: u32 = 0x7e00;

    fn read(bytes: &[u8]) -> u32 {
        read_u16(bytes)
    }

    fn write(bits: u32, bytes: &mut [u8]) {
        write_u16(bits, bytes);
    }

    fn to_f32(bits: u32) -> f32 {
        let sign = (bits & 0x8000) << 16;
        let exponent = (bits >> 10) & 0x1f;
        let fraction = bits & 0x3ff;
        match exponent {
            // A subnormal is a whole number of steps of 2^-24.
            0 => f32::from_bits(sign | (fraction as f32 * f32::from_bits(0x3380_0000)).to_bits()),
            0x1f => f32::from_bits(sign | 0x7f80_0000 | (fraction << 13)),
            _ => f32::from_bits(sign | ((exponent + 112) << 23) | (fraction << 13)),
        }
    }

    fn round(value: f32) -> u32 {
        if value.is_nan() {
            return Self::NAN;
        }
        let sign = (value.to_bits() >> 16) & 0x8000;
        let bits = value.to_bits() & 0x7fff_ffff;
        let rounded = if bits < 0x3880_0000 {
            // Below 2^-14 the result is a whole number of steps of 2^-24; scaling by 2^24 is exact.
            (f32::from_bits(bits) * 16_777_216.0).round_ties_even() as u32
        } else {
            // A carry out of the fraction lands in the exponent, where it belongs.
            (bits - (112 << 23) + 0xfff + ((bits >> 13) & 1)) >> 13
        };
        sign | rounded.min(0x7c00)
    }
}

impl Element for Fp32 {
    type Scale = Self;
    const BYTES: usize = 4;
    const LARGEST: u32 = 0x7f7f_ffff;
    const NAN: u32 = 0x7fc0_0000;

    fn read(bytes: &[u8]) -> u32 {
        u32::from_ne_bytes(bytes.try_into().expect("an fp32 has four bytes"))
    }

    fn write(bits: u32, bytes: &mut [u8]) {
        bytes.copy_from_slice(&bits.to_ne_bytes());
    }

    fn to_f32(bits: u32) -> f32 {
        f32::from_bits(bits)
    }

    fn round(value: f32) -> u32 {
        if value.is_nan() {
            Self::NAN
        } else {
            value.to_bits()
        }
    }
}

fn read_u16(bytes: &[u8]) -> u32 {
    u32::from(u16::from_ne_bytes(
        bytes.try_into().expect("a 16-bit element has two bytes"),
    ))
}

fn write_u16(bits: u32, bytes: &mut [u8]) {
    let bits = u16::try_from(bits).expect("a 16-bit element has 16 bits");
    bytes.copy_from_slice(&bits.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bit_types_survive_a_round_trip_through_fp32() {
        fn check<E: Element>() {
            for bits in 0..=0xffff {
                let back = E::round(E::to_f32(bits));
                assert_eq!(
                    back,
                    if E::abs(bits) > E::LARGEST + 1 {
                        E::NAN
                    } else {
                        bits
                    }
                );
            }
        }
        check::<Bf16>();
        check::<Fp16>();
    }

    #[test]
    fn rounding_takes_the_nearest_and_the_even_of_two() {
        fn check<E: Element>() {
            for bits in 0..E::LARGEST {
                let low = f64::from(E::to_f32(bits));
                let high = f64::from(E::to_f32(bits + 1));
                let middle = (f64::midpoint(low, high)) as f32;
                assert_eq!(E::round(middle), bits + (bits & 1));
                assert_eq!(E::round(middle.next_down()), bits);
                assert_eq!(E::round(middle.next_up()), bits + 1);
            }
            assert_eq!(E::round(f32::INFINITY), E::LARGEST + 1);
            assert_eq!(E::round(f32::MAX), E::LARGEST + 1);
        }
        check::<Bf16>();
        check::<Fp16>();
    }
}
