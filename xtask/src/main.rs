//! Repository chores: `cargo xtask tidy`.
#![forbid(unsafe_code)]

mod tidy;

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["tidy"] => tidy::run(&root()),
        _ => {
            eprintln!(
                "usage: cargo xtask tidy   (checks what the compiler does not; see CONTRIBUTING.md)"
            );
            ExitCode::from(2)
        }
    }
}

/// The repository: the parent of this package.
fn root() -> std::path::PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package).to_path_buf()
}
