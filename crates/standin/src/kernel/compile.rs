//! The C++ compiler, which turns a program into the bytes of a shared object.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{env, fs, io, process};

use super::options::CompileOptions;
use super::source;

/// A source or header with its name for `#include`.
#[derive(Clone, Debug)]
pub(crate) struct SourceText {
    /// Its name.
    pub(crate) name: String,
    /// Its text.
    pub(crate) text: String,
}

/// The reason why there is no code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CompileError {
    /// An option is unknown or has an invalid value; a line for the log.
    Option(String),
    /// The program is wrong; the log of the compiler.
    Program(String),
    /// The compiler could not be run.
    Compiler(String),
}

/// Code and messages of a compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Compiled {
    /// A shared object.
    pub(crate) code: Vec<u8>,
    /// Messages of the compiler.
    pub(crate) log: String,
}

/// Compiles a program with the headers that it includes.
pub(crate) fn compile(
    program: &SourceText,
    headers: &[SourceText],
    options: &[String],
) -> Result<Compiled, CompileError> {
    let options = CompileOptions::parse(options).map_err(CompileError::Option)?;
    let compiler = CppCompiler::new(&options)?;
    for SourceText { name, text } in headers {
        compiler.write(name, text)?;
    }
    // Kernels can come from macros, so they are searched for in the output of the preprocessor.
    let named = format!("#line 1 \"{}\"\n{}", program.name, program.text);
    compiler.write("program.cpp", &named)?;
    compiler.run(&["-E", "program.cpp", "-o", "program.ii"])?;
    let source = String::from_utf8_lossy(&compiler.read("program.ii")?).into_owned();
    let translated = source::translate(&source).map_err(CompileError::Program)?;
    compiler.write("unit.cpp", &source::unit(&translated))?;
    let log = compiler.run(&["-shared", "unit.cpp", "-o", "unit.so"])?;
    let mut code = compiler.read("unit.so")?;
    if let Some(place) = code.get_mut(STAMP) {
        place.copy_from_slice(&stamp());
    }
    Ok(Compiled { code, log })
}

/// Place of the stamp in code: padding of the ELF header, which is zero.
const STAMP: std::ops::Range<usize> = 9..16;

/// A hash of the compiler's name, its additional flags and the shim: the backend caches code, and
/// the loader refuses code that was compiled with others.
fn stamp() -> [u8; STAMP.end - STAMP.start] {
    let (compiler, flags) = command();
    let [_, rest @ ..] = source::stamp(&[&compiler, &flags]).to_le_bytes();
    rest
}

/// Code without its stamp, for the loader; `None` if the stamp differs.
pub(super) fn unstamped(code: &[u8]) -> Option<Vec<u8>> {
    let mut code = code.to_vec();
    let place = code.get_mut(STAMP)?;
    if *place != stamp() {
        return None;
    }
    place.fill(0);
    Some(code)
}

/// The compiler's name, and additional flags.
fn command() -> (String, String) {
    let compiler = env::var("MERISTEM_STANDIN_COMPILER").unwrap_or_else(|_| "g++".into());
    (compiler, env::var("MERISTEM_STANDIN_FLAGS").unwrap_or_default())
}

/// The compiler, with a temporary folder.
struct CppCompiler {
    folder: CompilerFolder,
    name: String,
    flags: Vec<String>,
}

/// Flags that do not depend on the options of a program.
const FLAGS: [&str; 15] = [
    "-O2",
    "-fPIC",
    "-nostdinc",
    "-nostdinc++",
    "-nostartfiles",
    "-fvisibility=hidden",
    // Symbols of the same name in two modules, or in libc, are not merged.
    "-fno-gnu-unique",
    "-Wl,-Bsymbolic",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    // A variable without a value is a large negative number, not arbitrary memory.
    "-ftrivial-auto-var-init=pattern",
    // A misaligned access is a fault on a device, and none on the host.
    "-fsanitize=alignment",
    "-fsanitize-undefined-trap-on-error",
];

/// Flags that silence warnings about CUDA's attributes and pragmas, and the folder of headers.
const QUIET: [&str; 3] = ["-Wno-attributes", "-Wno-unknown-pragmas", "-I."];

impl CppCompiler {
    fn new(options: &CompileOptions) -> Result<Self, CompileError> {
        let (name, extra) = command();
        let own = FLAGS.iter().chain(&QUIET).map(ToString::to_string);
        let extra = extra.split_whitespace().map(String::from);
        let flags = own.chain(options.flags()).chain(extra).collect();
        Ok(Self { folder: CompilerFolder::new().map_err(no_file)?, name, flags })
    }

    /// Runs it; returns its messages.
    fn run(&self, arguments: &[&str]) -> Result<String, CompileError> {
        let mut command = Command::new(&self.name);
        command.current_dir(&self.folder.0).args(&self.flags).args(arguments);
        // A sanitizer that is preloaded into this process must not be loaded into the compiler.
        command.env_remove("LD_PRELOAD").env("LC_ALL", "C");
        let output = command.output().map_err(|error| {
            CompileError::Compiler(format!("{}: {error}; is it installed?", self.name))
        })?;
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(log) } else { Err(CompileError::Program(log)) }
    }

    fn write(&self, name: &str, text: &str) -> Result<(), CompileError> {
        let path = self.folder.0.join(name);
        let folder = path.parent().unwrap_or(&self.folder.0);
        fs::create_dir_all(folder).and_then(|()| fs::write(&path, text)).map_err(no_file)
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, CompileError> {
        fs::read(self.folder.0.join(name)).map_err(no_file)
    }
}

fn no_file(error: io::Error) -> CompileError {
    CompileError::Compiler(format!("files for the compiler: {error}"))
}

/// A temporary folder, removed with its contents.
struct CompilerFolder(PathBuf);

impl CompilerFolder {
    fn new() -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = env::temp_dir().join(format!("meristem-standin-{}-{number}", process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for CompilerFolder {
    fn drop(&mut self) {
        // Best effort: the system clears its folder for temporary files, too.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_with_the_stamp_of_this_compiler_is_taken() {
        let mut code = vec![0; 64];
        assert_eq!(unstamped(&code), None);
        code[STAMP].copy_from_slice(&stamp());
        assert_eq!(unstamped(&code), Some(vec![0; 64]));
        assert_eq!(unstamped(&code[..12]), None);
    }
}
