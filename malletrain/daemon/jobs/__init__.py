"""What is stored and measured of each job."""
