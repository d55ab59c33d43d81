//! Repository chores: `cargo xtask tidy` and `cargo xtask standin`.
#![forbid(unsafe_code)]

mod standin;
mod tidy;

use std::path::Path;
use std::process::ExitCode;

/// The commands.
const USAGE: &str = "\
usage: cargo xtask tidy                   checks what the compiler does not; see CONTRIBUTING.md
       cargo xtask standin [...] COMMAND  runs COMMAND on the stand-in for CUDA; see --help
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.split_first() {
        Some((command, [])) if command == "tidy" => tidy::run(&root()),
        Some((command, rest)) if command == "standin" => standin::run(&root(), rest),
        _ => {
            eprint!("{USAGE}");
            ExitCode::from(2)
        }
    }
}

/// The repository: the parent of this package.
fn root() -> std::path::PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package).to_path_buf()
}
