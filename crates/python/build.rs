//! Linker arguments for a module that Python loads. On macOS the module's undefined symbols are
//! resolved by the Python process.

fn main() {
    pyo3_build_config::add_extension_module_link_args();
}
