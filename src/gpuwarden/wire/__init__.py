"""Generated protocol messages (see wire/*.proto); not edited by hand."""
