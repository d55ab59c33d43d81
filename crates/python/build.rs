//! Arguments of the linker for a module that Python loads: on macOS its symbols are Python's own.

fn main() {
    pyo3_build_config::add_extension_module_link_args();
}
