// Command controlplane is a Kubernetes control plane for tests: etcd, API server, controllers and scheduler in one
// process on loopback addresses. It writes the administrator's kubeconfig into the folder that is its one argument, then
// the file ready. SIGTERM ends it at once, and its data with it: etcd syncs nothing.
package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"log"
	"net"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/storage/wal"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/controller-manager/pkg/informerfactory"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	apiserveroptions "k8s.io/kubernetes/cmd/kube-apiserver/app/options"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	manageroptions "k8s.io/kubernetes/cmd/kube-controller-manager/app/options"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	scheduleroptions "k8s.io/kubernetes/cmd/kube-scheduler/app/options"
	"k8s.io/kubernetes/pkg/controller/garbagecollector"
)

const loopback = "127.0.0.1"

// Not the node life cycle's, which wants heartbeats of a kubelet, nor those of endpoints, which may not be on loopback
// addresses. The garbage collector runs apart: see collectGarbage.
const controllers = "statefulset-controller,deployment-controller,replicaset-controller,disruption-controller," +
	"namespace-controller,serviceaccount-controller,serviceaccount-token-controller," +
	"root-ca-certificate-publisher-controller,persistentvolume-binder-controller," +
	"persistentvolumeclaim-protection-controller,pod-garbage-collector-controller,-garbage-collector-controller"

var (
	folder string
	ended  = make(chan error, 3)
)

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: controlplane FOLDER")
	}
	folder = os.Args[1]
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	must(os.MkdirAll(folder, 0o700))
	config := serveAPI(ctx, startEtcd())
	awaitReadiness(ctx, config)
	startControllers(ctx)
	collectGarbage(ctx, config)
	startScheduler(ctx)
	must(os.WriteFile(in("ready"), nil, 0o600))
	select {
	case <-ctx.Done():
	case err := <-ended:
		log.Fatal(err)
	}
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func in(name string) string { return filepath.Join(folder, name) }

// The peers' listener is left out, and the clients' one is on a port that was free a moment ago: embed takes addresses.
func startEtcd() string {
	listener, err := net.Listen("tcp", loopback+":0")
	must(err)
	address := url.URL{Scheme: "http", Host: listener.Addr().String()}
	must(listener.Close())
	wal.SegmentSizeBytes = 8 << 20 // two are set aside at once: of the usual 64 MiB each
	config := embed.NewConfig()
	config.Dir, config.LogLevel, config.UnsafeNoFsync = in("etcd"), "error", true
	config.ListenPeerUrls = []url.URL{}
	config.ListenClientUrls, config.AdvertiseClientUrls = []url.URL{address}, []url.URL{address}
	server, err := embed.StartEtcd(config)
	must(err)
	<-server.Server.ReadyNotify()
	return address.String()
}

func writeKeys() {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	pem, err := keyutil.MarshalPrivateKeyToPEM(key)
	must(err)
	must(keyutil.WriteKey(in("accounts.key"), pem))
	certificate, certificateKey, err := certutil.GenerateSelfSignedCertKey(loopback, []net.IP{net.ParseIP(loopback)}, nil)
	must(err)
	must(certutil.WriteCert(in("server.crt"), certificate)) // and behind it its authority's
	must(keyutil.WriteKey(in("server.key"), certificateKey))
}

func parse(component string, flags cliflag.NamedFlagSets, arguments ...string) {
	all := pflag.NewFlagSet(component, pflag.ContinueOnError)
	for _, part := range flags.FlagSets {
		all.AddFlagSet(part)
	}
	must(all.Parse(arguments))
}

// serveAPI calls what the command of kube-apiserver does below its handler of signals, of which a process has one.
func serveAPI(ctx context.Context, etcd string) *rest.Config {
	writeKeys()
	token := rand.Text()
	must(os.WriteFile(in("tokens.csv"), []byte(token+",administrator,administrator,system:masters\n"), 0o600))
	options := apiserveroptions.NewServerRunOptions()
	parse("apiserver", options.Flags(),
		"--etcd-servers="+etcd, "--bind-address="+loopback, "--authorization-mode=RBAC",
		"--endpoint-reconciler-type=none", // the server's own endpoint would be on a loopback address, which is refused
		"--tls-cert-file="+in("server.crt"), "--tls-private-key-file="+in("server.key"),
		"--token-auth-file="+in("tokens.csv"), "--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+in("accounts.key"), "--service-account-signing-key-file="+in("accounts.key"),
		"--service-cluster-ip-range=10.0.0.0/24",
		"--disable-admission-plugins=TaintNodesByCondition", // nobody would take the taint from a new node again
	)
	listener, err := net.Listen("tcp", loopback+":0")
	must(err)
	options.SecureServing.Listener = listener
	options.SecureServing.BindPort = listener.Addr().(*net.TCPAddr).Port
	must(options.GenericServerRunOptions.ComponentGlobalsRegistry.Set())
	completed, err := options.Complete(ctx)
	must(err)
	go func() { ended <- apiserver.Run(ctx, completed) }()
	return writeKubeconfig(listener.Addr().String(), token)
}

func writeKubeconfig(address, token string) *rest.Config {
	authority, err := os.ReadFile(in("server.crt"))
	must(err)
	written := clientcmdapi.NewConfig()
	written.Clusters["test"] = &clientcmdapi.Cluster{Server: "https://" + address, CertificateAuthorityData: authority}
	written.AuthInfos["administrator"] = &clientcmdapi.AuthInfo{Token: token}
	written.Contexts["test"] = &clientcmdapi.Context{Cluster: "test", AuthInfo: "administrator"}
	written.CurrentContext = "test"
	must(clientcmd.WriteToFile(*written, in("kubeconfig")))
	config, err := clientcmd.BuildConfigFromFlags("", in("kubeconfig"))
	must(err)
	config.QPS, config.Burst = 500, 1000
	return config
}

func awaitReadiness(ctx context.Context, config *rest.Config) {
	client := kubernetes.NewForConfigOrDie(config).Discovery().RESTClient()
	for {
		answer, err := client.Get().AbsPath("/readyz").DoRaw(ctx)
		if err == nil && strings.TrimSpace(string(answer)) == "ok" {
			return
		}
		select {
		case err := <-ended:
			log.Fatal(err)
		case <-ctx.Done():
			os.Exit(1)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func startControllers(ctx context.Context) {
	options, err := manageroptions.NewKubeControllerManagerOptions()
	must(err)
	known, off, aliases := manager.KnownControllers(), manager.ControllersDisabledByDefault(), manager.ControllerAliases()
	flags := options.Flags(known, off, aliases)
	options.ParsedFlags = &flags
	parse("controllers", flags, "--kubeconfig="+in("kubeconfig"), "--secure-port=0", "--leader-elect=false",
		"--controllers="+controllers, "--kube-api-qps=500", "--kube-api-burst=1000",
		"--service-account-private-key-file="+in("accounts.key"), "--root-ca-file="+in("server.crt"))
	config, err := options.Config(ctx, known, off, aliases)
	must(err)
	go func() { ended <- manager.Run(ctx, config.Complete()) }()
}

// collectGarbage looks for new kinds of owners each second; within the controller manager it would each 30 seconds.
func collectGarbage(ctx context.Context, config *rest.Config) {
	client, objects := kubernetes.NewForConfigOrDie(config), metadata.NewForConfigOrDie(config)
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(client.Discovery()))
	watched := informerfactory.NewInformerFactory(
		informers.NewSharedInformerFactory(client, 0), metadatainformer.NewSharedInformerFactory(objects, 0))
	started := make(chan struct{})
	collector, err := garbagecollector.NewGarbageCollector(
		ctx, client, objects, mapper, garbagecollector.DefaultIgnoredResources(), watched, started)
	must(err)
	watched.Start(ctx.Done())
	close(started)
	go collector.Run(ctx, 4, 10*time.Second)
	go collector.Sync(ctx, client.Discovery(), time.Second)
}

func startScheduler(ctx context.Context) {
	options := scheduleroptions.NewOptions()
	parse("scheduler", *options.Flags, "--kubeconfig="+in("kubeconfig"), "--secure-port=0", "--leader-elect=false")
	config, running, err := scheduler.Setup(ctx, options)
	must(err)
	go func() { ended <- scheduler.Run(ctx, config, running) }()
}
