//! `meristem completions` and `meristem man`: shell completions and manual pages.

use std::fs;
use std::io;
use std::path::Path;
use std::process::ExitCode;

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;
use meristem::train::run_folder::write_whole;

use super::Outcome;
use crate::cli::Arguments;
use crate::failure::Failure;
use crate::plain::{self, counted, printable};

/// Prints the completions for a shell.
pub(crate) fn completions(shell: Shell) -> Outcome {
    let mut script = vec![];
    clap_complete::generate(shell, &mut Arguments::command(), "meristem", &mut script);
    plain::data(String::from_utf8_lossy(&script).trim_end());
    Ok(ExitCode::SUCCESS)
}

/// Writes a page for each command into a folder.
pub(crate) fn man(folder: &Path) -> Outcome {
    let failed = |error: io::Error| {
        let message = format!("cannot write pages to {}: {error}", folder.display());
        Failure::failed(message, "give a folder in which you can write")
    };
    let mut command = Arguments::command();
    command.build();
    let mut pages = vec![];
    render(&command, &mut pages).map_err(failed)?;
    if let Some((there, _)) = pages.iter().find(|(name, _)| folder.join(name).exists()) {
        let message = format!("{} exists and would be overwritten", folder.join(there).display());
        return Err(Failure::usage(message, "give a new folder, or remove the old pages"));
    }
    fs::create_dir_all(folder).map_err(failed)?;
    for (name, page) in &pages {
        write_whole(&folder.join(name), page)?;
    }
    let what = counted(pages.len(), ["page", "pages"]);
    plain::out(&printable(&format!("{}: {what}; read them with `man -l FILE`", folder.display())));
    Ok(ExitCode::SUCCESS)
}

/// Renders the manual pages of a built command and of its subcommands.
fn render(command: &Command, pages: &mut Vec<(String, Vec<u8>)>) -> io::Result<()> {
    for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
        render(below, pages)?;
    }
    let mut page = vec![];
    Man::new(command.clone()).render(&mut page)?;
    let name = command.get_display_name().unwrap_or(command.get_name());
    pages.push((format!("{name}.1"), page));
    Ok(())
}
