// OpenSSL's functions. The library is loaded when it is first needed, so that nothing is linked and
// nothing has to be installed where nothing is encrypted.
//
// Declared here because its headers need not be there where the engine is built. Versions 1.1.1 and
// 3 have all of them, with these types.
#pragma once

#include <cstddef>
#include <string>

namespace unisono::openssl {

struct Context;  // SSL_CTX
struct Session;  // SSL
struct Stream;   // BIO
struct Method;   // SSL_METHOD or BIO_METHOD
struct Checks;   // X509_VERIFY_PARAM

constexpr int kWantsRead = 2;
constexpr int kWantsWrite = 3;

using AskSecret = unsigned (*)(Session*, const char* hint, char* identity, unsigned identity_size,
                               unsigned char* key, unsigned key_size);
using AskPassword = int (*)(char* into, int size, int is_for_writing, void* user);
using FindSecret = unsigned (*)(Session*, const char* identity, unsigned char* key,
                                unsigned key_size);

// X(result, name, arguments)
#define UNISONO_OPENSSL(X)                                                       \
  X(const Method*, TLS_method, ())                                               \
  X(Context*, SSL_CTX_new, (const Method*))                                      \
  X(void, SSL_CTX_free, (Context*))                                              \
  X(long, SSL_CTX_ctrl, (Context*, int, long, void*))                            \
  X(unsigned long, SSL_CTX_set_options, (Context*, unsigned long))               \
  X(int, SSL_CTX_set_num_tickets, (Context*, std::size_t))                       \
  X(int, SSL_CTX_set_ciphersuites, (Context*, const char*))                      \
  X(void, SSL_CTX_set_psk_client_callback, (Context*, AskSecret))                \
  X(void, SSL_CTX_set_psk_server_callback, (Context*, FindSecret))               \
  X(void, SSL_CTX_set_verify, (Context*, int, void*))                            \
  X(void, SSL_CTX_set_default_passwd_cb, (Context*, AskPassword))                \
  X(int, SSL_CTX_use_certificate_chain_file, (Context*, const char*))            \
  X(int, SSL_CTX_use_PrivateKey_file, (Context*, const char*, int))              \
  X(int, SSL_CTX_load_verify_locations, (Context*, const char*, const char*))    \
  X(int, SSL_set_session_id_context, (Session*, const unsigned char*, unsigned)) \
  X(Session*, SSL_new, (Context*))                                               \
  X(void, SSL_free, (Session*))                                                  \
  X(void, SSL_set_connect_state, (Session*))                                     \
  X(void, SSL_set_accept_state, (Session*))                                      \
  X(void, SSL_set_bio, (Session*, Stream*, Stream*))                             \
  X(int, SSL_do_handshake, (Session*))                                           \
  X(int, SSL_read, (Session*, void*, int))                                       \
  X(int, SSL_write, (Session*, const void*, int))                                \
  X(int, SSL_has_pending, (const Session*))                                      \
  X(int, SSL_get_error, (const Session*, int))                                   \
  X(int, SSL_session_reused, (const Session*))                                   \
  X(int, SSL_key_update, (Session*, int))                                        \
  X(int, SSL_set_ex_data, (Session*, int, void*))                                \
  X(void*, SSL_get_ex_data, (const Session*, int))                               \
  X(long, SSL_get_verify_result, (const Session*))                               \
  X(Checks*, SSL_get0_param, (Session*))                                         \
  X(int, X509_VERIFY_PARAM_set1_host, (Checks*, const char*, std::size_t))       \
  X(int, X509_VERIFY_PARAM_set1_ip_asc, (Checks*, const char*))                  \
  X(const char*, X509_verify_cert_error_string, (long))                          \
  X(Method*, BIO_meth_new, (int, const char*))                                   \
  X(int, BIO_meth_set_write, (Method*, int (*)(Stream*, const char*, int)))      \
  X(int, BIO_meth_set_read, (Method*, int (*)(Stream*, char*, int)))             \
  X(int, BIO_meth_set_ctrl, (Method*, long (*)(Stream*, int, long, void*)))      \
  X(Stream*, BIO_new, (const Method*))                                           \
  X(void, BIO_set_data, (Stream*, void*))                                        \
  X(void*, BIO_get_data, (Stream*))                                              \
  X(void, BIO_set_init, (Stream*, int))                                          \
  X(void, BIO_set_flags, (Stream*, int))                                         \
  X(void, BIO_clear_flags, (Stream*, int))                                       \
  X(unsigned long, ERR_peek_error, ())                                           \
  X(const char*, ERR_reason_error_string, (unsigned long))                       \
  X(void, ERR_clear_error, ())                                                   \
  X(void, OPENSSL_cleanse, (void*, std::size_t))

struct Functions {
  // NOLINTNEXTLINE(bugprone-macro-parentheses)
#define UNISONO_MEMBER(result, name, arguments) result(*name) arguments = nullptr;
  UNISONO_OPENSSL(UNISONO_MEMBER)
#undef UNISONO_MEMBER
};

// Return the functions; load the library in the first call. nullptr: it is not there, see why_absent.
const Functions* functions();
const std::string& why_absent();

}  // namespace unisono::openssl
