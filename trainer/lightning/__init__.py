"""What `lockstep.lightning` offers: Lightning's names and arguments, mapped onto Lockstep's."""
