"""Programs compiled and run: `lowering`, `compiling`, `execution`; `devices`, measured `rates`."""
