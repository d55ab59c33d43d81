//! Names of errors.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::sync::Mutex;

use cudarc::driver::sys::CUresult;

use super::call::{driver, write};

/// Requested texts. They live as long as the process, like the driver's.
static TEXTS: Mutex<BTreeMap<String, CString>> = Mutex::new(BTreeMap::new());

fn text(of: String) -> *const c_char {
    let mut texts = TEXTS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let kept =
        texts.entry(of).or_insert_with_key(|of| CString::new(of.as_str()).unwrap_or_default());
    kept.as_ptr()
}

driver! {
    /// The name of an error, such as `CUDA_ERROR_INVALID_VALUE`.
    fn cuGetErrorName(error: CUresult, pStr: *mut *const c_char) {
        write(pStr, text(format!("{error:?}")))
    }

    /// The description of an error.
    fn cuGetErrorString(error: CUresult, pStr: *mut *const c_char) {
        let name = format!("{error:?}");
        let words = name.trim_start_matches("CUDA_").trim_start_matches("ERROR_");
        let words = words.to_lowercase().replace('_', " ");
        write(pStr, text(words))
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::ptr;

    use super::*;

    #[test]
    fn an_error_has_a_name_and_words() {
        for (function, expected) in [
            (cuGetErrorName as unsafe extern "C" fn(_, _) -> _, c"CUDA_ERROR_OUT_OF_MEMORY"),
            (cuGetErrorString, c"out of memory"),
        ] {
            let mut name = ptr::null();
            // SAFETY: the place is ours; the text lives as long as the process.
            let text = unsafe {
                let code = function(CUresult::CUDA_ERROR_OUT_OF_MEMORY, &raw mut name);
                assert_eq!(code, CUresult::CUDA_SUCCESS);
                CStr::from_ptr(name)
            };
            assert_eq!(text, expected);
        }
    }
}
