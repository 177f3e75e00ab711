"""The folder that is appended to `sys.path`; a package only so that it is installed with the rest."""
