// Keeps the binary loadable on glibc 2.28 and libstdc++ of GCC 8 (manylinux_2_28) when a newer compiler builds it.
#include <istream>
#include <locale>
#include <ostream>
// The default constructors of these streams are newer symbols of libstdc++: with the macro, they are instantiated here.
// Set before <locale>, it would instantiate facets twice, and formatted numbers would be lost.
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
#include <sstream>

template class std::basic_stringstream<char>;
template class std::basic_ostringstream<char>;

// glibc 2.32 tells a process here whether it has one thread; "no" is always right.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;
