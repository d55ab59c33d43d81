#![no_main]
//! Scripts of actions.

use std::sync::LazyLock;

use meristem_control::{Script, parse_action};
use meristem_grow::Host;

static HOST: LazyLock<Host> = LazyLock::new(meristem_fuzz::host);

libfuzzer_sys::fuzz_target!(|text: &str| {
    let _ = (Script::parse("script", text, &HOST), parse_action(text, &HOST));
});
