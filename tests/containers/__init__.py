"""Jobs in real containers. Need Charliecloud, which ``make test`` installs."""
