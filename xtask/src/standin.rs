//! `cargo xtask standin`: runs a command with the stand-in driver instead of CUDA's.

use std::error::Error;
use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::UNIX_EPOCH;
use std::{env, fs, io};

/// Help of the command.
const HELP: &str = "\
Runs COMMAND on the stand-in driver: what loads libcuda, libnvrtc or libnccl gets the library of
crates/standin, which runs kernels on the CPU in hostile orders. No GPU and no CUDA is needed, but a
C++ compiler is.

usage: cargo xtask standin [OPTIONS] COMMAND [ARGUMENTS]...

options:
  --seed N       decides the order of streams, blocks and threads (MERISTEM_STANDIN_SEED, 0)
  --devices N    number of devices (MERISTEM_STANDIN_DEVICES, 1)
  --asan         compiles kernels with AddressSanitizer, and preloads it into COMMAND
  --help         prints this

environment:
  MERISTEM_STANDIN_MEMORY     bytes of memory of each device (8 GiB)
  MERISTEM_STANDIN_SHARED     most bytes of dynamic shared memory of a block (232448; 101376 is the
                              most on compute capability 8.6, 8.9 and 12.0)
  MERISTEM_STANDIN_COMPILER   the C++ compiler (g++)
  MERISTEM_STANDIN_FLAGS      more flags for it

The exit code is that of COMMAND.
";

/// The names under which the CUDA backend, and an MPI library for GPUs, look for libraries.
const LINKS: [&str; 4] = ["libcuda.so", "libcuda.so.1", "libnvrtc.so", "libnccl.so.2"];

/// Runs the command that `arguments` name.
pub(crate) fn run(root: &Path, arguments: &[String]) -> ExitCode {
    let code = Options::parse(arguments).and_then(|options| match options {
        None => {
            print!("{HELP}");
            Ok(0)
        }
        Some(options) => options.run(root).map_err(|error| error.to_string()),
    });
    code.map(ExitCode::from).unwrap_or_else(|error| {
        eprintln!("cargo xtask standin: {error}");
        ExitCode::from(2)
    })
}

#[derive(Debug, PartialEq, Eq)]
struct Options {
    /// Variables for the command.
    variables: Vec<(&'static str, String)>,
    asan: bool,
    command: Vec<String>,
}

impl Options {
    /// Reads the arguments; `None` is a call for help.
    fn parse(arguments: &[String]) -> Result<Option<Self>, String> {
        let mut options = Self { variables: vec![], asan: false, command: vec![] };
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let variable = match argument.as_str() {
                "--seed" => "MERISTEM_STANDIN_SEED",
                "--devices" => "MERISTEM_STANDIN_DEVICES",
                "--asan" => {
                    options.asan = true;
                    continue;
                }
                "--help" => return Ok(None),
                other if other.starts_with('-') => {
                    return Err(format!("unknown option {other}; see --help"));
                }
                command => {
                    options.command = [command.to_string()].into();
                    options.command.extend(rest.cloned());
                    return Ok(Some(options));
                }
            };
            let value = rest.next().filter(|value| value.parse::<u64>().is_ok());
            let value = value.ok_or_else(|| format!("{argument} takes a whole number"))?;
            options.variables.push((variable, value.clone()));
        }
        Err("which command? See --help".into())
    }

    fn run(&self, root: &Path) -> Result<u8, Box<dyn Error>> {
        let folder = build(root)?;
        let [program, arguments @ ..] = &self.command[..] else { return Err("no command".into()) };
        let mut command = Command::new(program);
        command.args(arguments).envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.env("MERISTEM_CACHE", cache(&folder)?);
        command.env("LD_LIBRARY_PATH", first(folder.into(), env::var_os("LD_LIBRARY_PATH"), ":"));
        if self.asan {
            sanitize(&mut command, program == "cargo")?;
        }
        let status = command.status().map_err(|error| format!("{program}: {error}"))?;
        // A command that a signal ended has no code.
        Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
    }
}

/// Builds the library and returns the folder with the links to it.
fn build(root: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--quiet", "--package", "meristem-standin", "--lib"])
        .arg("--message-format=json-render-diagnostics")
        .current_dir(root)
        .stderr(Stdio::inherit())
        .output()?;
    // Cargo reports the path of the library.
    let messages = String::from_utf8(built.stdout)?;
    let mut texts = messages.split('"');
    let library = texts.find(|text| text.ends_with("/libmeristem_standin.so"));
    let library = library.filter(|_| built.status.success());
    let library = PathBuf::from(library.ok_or("the stand-in could not be built")?);
    let folder = library.with_file_name("standin");
    fs::create_dir_all(&folder)?;
    for name in LINKS {
        let link = folder.join(name);
        if fs::read_link(&link).is_ok_and(|to| to == library) {
            continue;
        }
        match fs::remove_file(&link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => symlink(&library, link)?,
        }
    }
    Ok(fs::canonicalize(folder)?)
}

/// A folder for compiled kernels that only this build of the stand-in uses: the compiled kernels
/// are no code for a GPU, and depend on its header. Folders of earlier builds are removed.
fn cache(folder: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let library = fs::metadata(folder.join(LINKS[0]))?;
    let changed = library.modified()?.duration_since(UNIX_EPOCH)?.as_nanos();
    let name = format!("kernels-{changed}");
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() && entry.file_name() != *name {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(folder.join(name))
}

/// Compiles kernels with AddressSanitizer. Under cargo it is preloaded only into the programs that
/// cargo runs, because the compiler does not run with it.
fn sanitize(command: &mut Command, is_cargo: bool) -> Result<(), Box<dyn Error>> {
    let compiler = env::var("MERISTEM_STANDIN_COMPILER").unwrap_or_else(|_| "g++".into());
    let found = Command::new(&compiler).arg("-print-file-name=libasan.so").output()?;
    let library = PathBuf::from(String::from_utf8(found.stdout)?.trim());
    if !library.is_absolute() {
        return Err(format!("{compiler} has no AddressSanitizer (libasan.so)").into());
    }
    if is_cargo {
        let target = env::consts::ARCH.to_uppercase();
        let runner = format!("env LD_PRELOAD={}", library.display());
        command.env(format!("CARGO_TARGET_{target}_UNKNOWN_LINUX_GNU_RUNNER"), runner);
    } else {
        command.env("LD_PRELOAD", first(library.into(), env::var_os("LD_PRELOAD"), ":"));
    }
    let (flags, options) = ("MERISTEM_STANDIN_FLAGS", "ASAN_OPTIONS");
    let asan = "-fsanitize=address -fno-omit-frame-pointer -g1";
    command.env(flags, first(asan.into(), env::var_os(flags), " "));
    // Leaks at the end of a process are not reported.
    command.env(options, first("detect_leaks=0".into(), env::var_os(options), ":"));
    Ok(())
}

/// A list with a new first element.
fn first(mut new: OsString, rest: Option<OsString>, between: &str) -> OsString {
    if let Some(rest) = rest.filter(|rest| !rest.is_empty()) {
        new.push(between);
        new.push(rest);
    }
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<Option<Options>, String> {
        Options::parse(&arguments.iter().map(ToString::to_string).collect::<Vec<_>>())
    }

    #[test]
    fn options_stand_before_the_command() {
        let expected = Options {
            variables: vec![("MERISTEM_STANDIN_SEED", "3".into())],
            asan: true,
            command: ["cargo", "test", "--help"].map(String::from).into(),
        };
        let given = parse(&["--seed", "3", "--asan", "cargo", "test", "--help"]);
        assert_eq!(given, Ok(Some(expected)));
        assert_eq!(parse(&["--help"]), Ok(None));
        assert_eq!(parse(&["--seed", "x", "a"]), Err("--seed takes a whole number".into()));
        assert_eq!(parse(&["--fast", "a"]), Err("unknown option --fast; see --help".into()));
        assert_eq!(parse(&["--seed", "1"]), Err("which command? See --help".into()));
    }
}
