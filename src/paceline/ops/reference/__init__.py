"""Every op in plain torch: the definition that faster implementations are checked against."""
