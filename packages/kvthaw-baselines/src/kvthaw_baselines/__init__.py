"""Methods of other papers for kvthaw, one file each. The entry points of the package name them."""
