//! Options of NVRTC, as flags of the C++ compiler.

/// Options of one compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CompileOptions {
    /// Compute capability times ten, such as 90.
    architecture: u32,
    /// Whether `a * b + c` may become one operation, which is the default of NVRTC.
    fused: bool,
    standard: String,
    /// Flags that are the same for both compilers: `-D`, `-U`, `-I`.
    passed: Vec<String>,
}

/// Options without an effect in the stand-in.
const IGNORED: [&str; 9] = [
    "-default-device",
    "--device-as-default-execution-space",
    "-lineinfo",
    "--generate-line-info",
    "-w",
    "--disable-warnings",
    "-restrict",
    "--restrict",
    "-extra-device-vectorization",
];

/// The same for options with a value.
const IGNORED_VALUES: [&str; 7] = [
    "--maxrregcount",
    "-maxrregcount",
    "--ptxas-options",
    "-Xptxas",
    "--minimal",
    "--prec-div",
    "--prec-sqrt",
];

impl CompileOptions {
    /// Reads the options; the error is a line for the program's log.
    pub(crate) fn parse(options: &[String]) -> Result<Self, String> {
        let mut parsed =
            Self { architecture: 75, fused: true, standard: "c++17".into(), passed: vec![] };
        let mut rest = options.iter();
        while let Some(option) = rest.next() {
            if IGNORED.contains(&option.as_str()) {
                continue;
            }
            if let Some(flag) = short(option) {
                let value = match &option[2..] {
                    "" => rest.next().ok_or_else(|| missing(option))?.as_str(),
                    value => value,
                };
                parsed.passed.push(format!("-{flag}{value}"));
                continue;
            }
            let (key, value) = match option.split_once('=') {
                Some((key, value)) => (key, value),
                None => (option.as_str(), rest.next().ok_or_else(|| unknown(option))?.as_str()),
            };
            parsed.set(key, value)?;
        }
        Ok(parsed)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let invalid = || format!("nvrtc: error: invalid value for {key}: {value}");
        match key {
            "--gpu-architecture" | "-arch" => {
                let number = value.strip_prefix("sm_").or(value.strip_prefix("compute_"));
                let number = number.map(|number| number.trim_end_matches(['a', 'f']));
                self.architecture = number.and_then(|n| n.parse().ok()).ok_or_else(invalid)?;
                // The lowest compute capability that CUDA 13 supports.
                if self.architecture < 75 {
                    return Err(invalid());
                }
            }
            "--fmad" | "-fmad" => self.fused = value.parse().map_err(|_| invalid())?,
            "--std" | "-std" => {
                if !["c++17", "c++20"].contains(&value) {
                    return Err(invalid());
                }
                self.standard = value.into();
            }
            "--define-macro" => self.passed.push(format!("-D{value}")),
            "--undefine-macro" => self.passed.push(format!("-U{value}")),
            "--include-path" => self.passed.push(format!("-I{value}")),
            _ if IGNORED_VALUES.contains(&key) => {}
            _ => return Err(unknown(key)),
        }
        Ok(())
    }

    /// Flags of the C++ compiler.
    pub(crate) fn flags(&self) -> Vec<String> {
        let contract = if self.fused { "fast" } else { "off" };
        let mut flags = vec![
            format!("-std={}", self.standard),
            format!("-ffp-contract={contract}"),
            format!("-D__CUDA_ARCH__={}0", self.architecture),
            "-D__CUDACC__=1".into(),
            "-D__CUDACC_RTC__=1".into(),
            // For code that differs between the stand-in and a device.
            "-DMERISTEM_STANDIN=1".into(),
        ];
        if cfg!(target_arch = "x86_64") {
            flags.push("-mfma".into());
        }
        flags.extend(self.passed.iter().cloned());
        flags
    }
}

/// The letter of an option such as `-DNAME=1` or `-D NAME=1`.
fn short(option: &str) -> Option<char> {
    let mut letters = option.strip_prefix('-')?.chars();
    letters.next().filter(|letter| "DUI".contains(*letter))
}

fn unknown(option: &str) -> String {
    format!("nvrtc: error: unrecognized option {option} found")
}

fn missing(option: &str) -> String {
    format!("nvrtc: error: argument expected after {option}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(options: &[&str]) -> Result<Vec<String>, String> {
        let options: Vec<String> = options.iter().map(ToString::to_string).collect();
        CompileOptions::parse(&options).map(|options| options.flags())
    }

    #[test]
    fn known_options_become_flags() {
        let flags = parse(&[
            "--gpu-architecture=sm_90a",
            "--fmad=false",
            "-std=c++20",
            "-DA=1",
            "-D",
            "B",
            "--define-macro=C",
            "-default-device",
        ]);
        let flags = flags.unwrap();
        for flag in
            ["-std=c++20", "-ffp-contract=off", "-D__CUDA_ARCH__=900", "-DA=1", "-DB", "-DC"]
        {
            assert!(flags.contains(&flag.to_string()), "{flag} is not in {flags:?}");
        }
        assert!(parse(&[]).unwrap().contains(&"-ffp-contract=fast".to_string()));
    }

    #[test]
    fn others_are_refused() {
        for (option, message) in [
            ("--fast", "nvrtc: error: unrecognized option --fast found"),
            ("--fast=1", "nvrtc: error: unrecognized option --fast found"),
            ("-arch=sm_70", "nvrtc: error: invalid value for -arch: sm_70"),
            ("--fmad=maybe", "nvrtc: error: invalid value for --fmad: maybe"),
            ("-D", "nvrtc: error: argument expected after -D"),
        ] {
            assert_eq!(parse(&[option]), Err(message.to_string()));
        }
    }
}
