"""Key-value caches, one file each, behind one contract; `accounting` holds the closed byte formula of every one."""
