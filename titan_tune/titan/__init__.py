"""Everything that knows torchtitan 0.2.2: keys, defaults, TOML, rules."""
