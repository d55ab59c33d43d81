//! Functions of CUDA's libraries, looked up by name.

/// Declares `Functions`, the functions of a library that this crate calls. They return the
/// library's code as a number, because a library newer than the bindings may return a code that the
/// enum of the bindings lacks. The compiler compares the arguments with the bindings.
macro_rules! functions {
    ($bindings:ident, $result:ty, $library:literal, {
        $($name:ident($($argument:ty),* $(,)?);)*
    }) => {
        #[allow(non_snake_case, reason = "the library's names")]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        $(const _: unsafe fn($($argument),*) -> $result = $bindings::$name;)*

        impl Functions {
            /// Looks up the functions of the library, which has been found.
            fn find() -> Called<Functions> {
                // SAFETY: the library was found, so this does not panic.
                let library = unsafe { $bindings::culib() };
                Ok(Functions {
                    // SAFETY: the function has these arguments, as the bindings say, and returns an
                    // enum of 32 bits.
                    $($name: *unsafe { library.get(stringify!($name).as_bytes()) }.map_err(|_| {
                        let (library, function) = ($library, stringify!($name));
                        CudaError::MissingFunction { library, function }
                    })?,)*
                })
            }
        }
    };
}

pub(super) use functions;
