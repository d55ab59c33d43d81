#![no_main]
//! Tables of features and targets. The first byte selects the options.

use meristem_data::{MissingValues, TableOptions};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((options, bytes)) = bytes.split_first() else { return };
    let root = meristem_fuzz::file("rows.csv", bytes);
    let target = ["y", "z"].into_iter().take(1 + usize::from(options & 1));
    let table = TableOptions {
        target: target.map(str::to_string).collect(),
        missing: if options & 2 == 0 { MissingValues::Refuse } else { MissingValues::Fill },
        numbers: options & 4 != 0,
        rules: None,
    };
    meristem_fuzz::read_table(table, root);
});
