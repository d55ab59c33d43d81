//! Ready-made hosts: descriptions that come with the program, each a file in `ready_made`.

/// Name and description, in TOML, of every ready-made host.
pub const READY_MADE: [(&str, &str); 4] = [
    ("resnet8", include_str!("ready_made/resnet8.toml")),
    ("resnet20", include_str!("ready_made/resnet20.toml")),
    ("vgg8", include_str!("ready_made/vgg8.toml")),
    ("mobile", include_str!("ready_made/mobile.toml")),
];
