//! Macros of kernels: a plain Rust body compiled once per instruction set, and a loop as straight
//! code.

/// Defines functions whose first argument is an [`Isa`](super::Isa) and whose body, written once in
/// plain Rust over slices, is compiled for each instruction set, so that the compiler vectorises it
/// with the registers of that set. The body must not call into functions that are not
/// `#[inline(always)]` on its hot path: they would be compiled for the baseline instruction set.
/// (This happened to `for_each` with `exp` in its closure.) NEON is the baseline of aarch64, so the
/// plain body is the one for it.
macro_rules! isa_kernels {
    ($(
        $(#[$meta:meta])*
        $vis:vis fn $name:ident$(<$($gen:ident: $genty:ty),*>)?(
            $isa:ident: $isaty:ident $(, $arg:ident: $ty:ty)* $(,)?
        ) $(-> $ret:ty)? $body:block
    )*) => {$(
        $(#[$meta])*
        $vis fn $name$(<$(const $gen: $genty),*>)?($isa: $isaty $(, $arg: $ty)*) $(-> $ret)? {
            #[inline(always)]
            fn body$(<$(const $gen: $genty),*>)?($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2$(<$(const $gen: $genty),*>)?($($arg: $ty),*) $(-> $ret)? {
                body$(::<$($gen),*>)?($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
            fn avx512$(<$(const $gen: $genty),*>)?($($arg: $ty),*) $(-> $ret)? {
                body$(::<$($gen),*>)?($($arg),*)
            }

            match $isa.level() {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Isa` of this level exists only on machines that have it.
                $crate::isa::Level::Avx2 => unsafe { avx2$(::<$($gen),*>)?($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                $crate::isa::Level::Avx512 => unsafe {
                    avx512$(::<$($gen),*>)?($($arg),*)
                },
                _ => body$(::<$($gen),*>)?($($arg),*),
            }
        }
    )*};
}

/// Repeats the body once for each `$i < $n`, where `$n` is a constant of at most 8. The compiler
/// does not unroll a long loop, and then keeps the accumulators in memory. The macro expands the
/// body 8 times whatever `$n` is, 64 times in two dimensions; a larger limit would cost compile
/// time.
macro_rules! unroll {
    ($n:ident, $i:ident, $body:block) => {
        $crate::macros::unroll!(@ $n $i $body 8: 0 1 2 3 4 5 6 7)
    };
    (@ $n:ident $i:ident $body:block $most:literal: $($number:literal)*) => {
        const { assert!($n <= $most) };
        $(if $crate::macros::Below::<$number, $n>::YES {
            let $i: usize = $number;
            $body
        })*
    };
}

/// [`unroll`] over the rows of a tile, at most 28.
macro_rules! unroll_rows {
    ($n:ident, $i:ident, $body:block) => {
        $crate::macros::unroll!(@ $n $i $body 28: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16
            17 18 19 20 21 22 23 24 25 26 27)
    };
}

/// Whether `I < N`, as a constant: surplus repetitions of [`unroll`] are left out when a kernel is
/// instantiated. With a run-time comparison, their removal would be up to the optimiser.
pub(crate) struct Below<const I: usize, const N: usize>;

impl<const I: usize, const N: usize> Below<I, N> {
    pub(crate) const YES: bool = I < N;
}

pub(crate) use {isa_kernels, unroll, unroll_rows};
