"""One module a format: ``write(run_dir, tokens)`` makes a step, ``parse(files)`` is the plain parser of its format."""
